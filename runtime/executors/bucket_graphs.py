"""A bucket's launches as CUDA graphs: one graph, or two with the masks written between them.

Knows the order of launches and CUDA graphs; knows no buffer.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from spark_engine.device.resources import DeviceResources
from spark_engine.errors import EngineError
from spark_engine.runtime.executors.program import MemoryOperand

MASKS = MemoryOperand("input", "allow")  # mask of allowed ids; only `sample` reads it
Queue: TypeAlias = Callable[[], None]


class QueuedLaunch(NamedTuple):
    """One launch of a bucket: its node and kernel; `queue` puts it on the stream.

    `reads_masks`: it reads the mask of allowed ids.
    """

    node: str
    symbol: str
    queue: Queue
    reads_masks: bool = False


class BucketGraphs:
    """The launches of one bucket.

    With `graphs` each part is recorded once and replayed; `resources` owns the graphs. With `masks`
    the constructor records the two graphs of `launch_until_sampling` too, so that no step waits for
    recording.
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
        self._all()

    def launch_until_sampling(self) -> Queue:
        """Queues the launches before the first that reads masks; returns what queues the rest.

        Records the two graphs at the first call, unless the constructor did. Raises EngineError if
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
                    f"the {self._label} bucket has no launch that reads the mask of allowed ids; "
                    "rebuild the engine with spark-build"
                )
            at = reads.index(True)
            before, rest = self._launches[:at], self._launches[at:]
            self._parts = self._recorded(before), self._recorded(rest)
            self._launches = ()  # the parts have what they need of it
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
