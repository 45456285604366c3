"""A bucket's launches as CUDA graphs: one graph, or two with the masks written in between.

Knows the order of launches and CUDA graphs; knows no buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from spark_engine.device.resources import DeviceResources
from spark_engine.errors import EngineError
from spark_engine.runtime.executors.program import MemoryOperand

MASKS = MemoryOperand("input", "allow")  # allowed token ids: an operand of `sample` only
Queue: TypeAlias = Callable[[], None]


@dataclass(frozen=True)
class QueuedLaunch:
    """One launch of a bucket: its node and kernel; `queue` queues it on the stream.

    `reads_masks`: it reads the allowed token ids.
    """

    node: str
    symbol: str
    queue: Queue
    reads_masks: bool = False


class BucketGraphs:
    """The launches of one bucket.

    With `graphs` they are recorded once and replayed; the graphs belong to `resources`. With
    `masks` the two graphs of `launch_until_sampling` are recorded here too, so that no step waits
    for that.
    """

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
            self._split()

    def launch(self) -> None:
        """Queues all launches."""
        self._all()

    def launch_until_sampling(self) -> Queue:
        """Queues the launches before the first that reads masks; returns what queues the rest.

        Records the two graphs on the first call unless `masks` was given. Raises EngineError where
        no launch reads masks.
        """
        before, rest = self._split()
        before()
        return rest

    def _split(self) -> tuple[Queue, Queue]:
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
