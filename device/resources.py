"""The GPU resources of one owner, all of which `close` releases, also if construction failed.

Knows pairs of acquiring and releasing calls; knows no engine.
"""

from collections.abc import Callable
from contextlib import ExitStack

from spark_engine.device.gpu import Event, Gpu, Graph, Stream
from spark_engine.tensors import Bytes


class DeviceResources:
    """Memory, pinned memory, events and graphs of one owner; `close` releases the newest first."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self._undo = ExitStack()

    def memory(self, nbytes: int) -> int:
        """Allocates device memory; returns its address, on a 256-byte boundary."""
        address = self.gpu.allocate(nbytes)
        self._undo.callback(self.gpu.free, address)
        return address

    def zeros(self, nbytes: int) -> int:
        """Allocates device memory and queues filling it with zeros; returns its address."""
        address = self.memory(nbytes)
        self.gpu.fill(address, 0, max(nbytes, 1))
        return address

    def pinned(self, nbytes: int) -> Bytes:
        """Allocates page-locked host memory."""
        memory = self.gpu.pinned(nbytes)
        self._undo.callback(self.gpu.unpin, memory)
        return memory

    def pin(self, memory: Bytes) -> None:
        """Page-locks host memory that the caller allocated, and keeps it; leaves it pageable, from
        which copies are slower, on a GPU that cannot."""
        if self.gpu.registers:
            self.gpu.register(memory)
            self._undo.callback(self.gpu.unregister, memory)

    def event(self, timed: bool = False) -> Event:
        event = self.gpu.event(timed)
        self._undo.callback(self.gpu.destroy_event, event)
        return event

    def stream(self) -> Stream:
        """Creates a stream that waits for no other."""
        stream = self.gpu.new_stream()
        self._undo.callback(self.gpu.destroy_stream, stream)
        return stream

    def finally_(self, undo: Callable[[], None]) -> None:
        """Registers a call that `close` makes in its order."""
        self._undo.callback(undo)

    def graph(self, record: Callable[[], None]) -> Graph:
        """Records as a graph what `record` queues on the stream."""
        self.gpu.begin_capture()
        try:
            record()
        except BaseException:
            self.gpu.drop_capture()
            raise
        graph = self.gpu.end_capture()
        self._undo.callback(self.gpu.destroy_graph, graph)
        return graph

    def close(self) -> None:
        """Waits for queued work and releases everything, also if one release fails."""
        undo = self._undo.pop_all()
        undo.callback(self.gpu.wait)
        self.gpu.use()
        undo.close()
