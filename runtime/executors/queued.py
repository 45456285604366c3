"""A bucket's launches as CUDA graphs for a step: one, or two with the masks written in between.

Knows the order of launches and CUDA graphs; knows no buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from spark_engine.device_resources import DeviceResources
from spark_engine.errors import EngineError
from spark_engine.runtime.executors.program import MemoryOperand

MASKS = MemoryOperand("input", "allow")  # the ids that are allowed: an operand of `sample` alone
Queue: TypeAlias = Callable[[], None]


@dataclass(frozen=True)
class QueuedLaunch:
    """One launch of a bucket: its node and kernel; `queue` puts it on the stream by itself.

    `reads_masks`: it reads the ids that are allowed.
    """

    node: str
    symbol: str
    queue: Queue
    reads_masks: bool = False


class StepQueue:
    """The launches of one bucket. With `graphs` each part is recorded once and replayed; the
    graphs belong to `resources`. With `masks` all of them are recorded here: no step waits for
    that."""

    def __init__(
        self,
        label: str,
        launches: Sequence[QueuedLaunch],
        resources: DeviceResources,
        graphs: bool,
        masks: bool = False,
    ) -> None:
        self._label, self._launches = label, launches
        self._resources, self._graphs = resources, graphs
        self._all = self._recorded(launches)
        self._parts: tuple[Queue, Queue] | None = None
        if masks and any(one.reads_masks for one in launches):
            self.parts()

    def whole(self) -> None:
        """Queues all of them."""
        self._all()

    def parts(self) -> tuple[Queue, Queue]:
        """What queues those before the first that reads masks, and what queues the rest.

        Recorded when they are first asked for, if not before. Raises EngineError where no launch
        reads masks.
        """
        if self._parts is None:
            reads = [one.reads_masks for one in self._launches]
            if True not in reads:
                raise EngineError(
                    f"the {self._label} bucket has no launch that reads which ids are allowed; "
                    "rebuild the engine with spark-build"
                )
            at = reads.index(True)
            before, rest = self._launches[:at], self._launches[at:]
            self._parts = self._recorded(before), self._recorded(rest)
        return self._parts

    def _recorded(self, launches: Sequence[QueuedLaunch]) -> Queue:
        gpu = self._resources.gpu

        def queue() -> None:
            for launch in launches:
                launch.queue()

        if not self._graphs:
            return queue
        graph = self._resources.graph(queue)
        return lambda: gpu.replay(graph)
