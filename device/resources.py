"""What one owner has of a GPU, so that all of it is given back, wherever its making failed.

Knows the device's calls in pairs; knows no engine.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from spark_engine.device.gpu import Event, Gpu, Graph
from spark_engine.tensors import Bytes


class DeviceResources:
    """Memory, pinned memory, events and graphs of one owner, newest first given back by `close`."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self._undo = ExitStack()

    def memory(self, nbytes: int) -> int:
        """Address of fresh device memory, on a 256-byte boundary."""
        address = self.gpu.allocate(nbytes)
        self._undo.callback(self.gpu.free, address)
        return address

    def zeros(self, nbytes: int) -> int:
        """Address of fresh memory that holds zeros once the queue has come so far."""
        address = self.memory(nbytes)
        self.gpu.fill(address, 0, max(nbytes, 1))
        return address

    def pinned(self, nbytes: int) -> Bytes:
        """Page-locked host memory."""
        memory = self.gpu.pinned(nbytes)
        self._undo.callback(self.gpu.unpin, memory)
        return memory

    def event(self, timed: bool = False) -> Event:
        """A fresh event."""
        event = self.gpu.event(timed)
        self._undo.callback(self.gpu.destroy_event, event)
        return event

    def finally_(self, undo: Callable[[], None]) -> None:
        """Calls this too, in its turn."""
        self._undo.callback(undo)

    def graph(self, record: Callable[[], None]) -> Graph:
        """What `record` puts on the stream, as a graph."""
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
        """Waits for what is queued and gives everything back, all of it even where a part fails."""
        undo = self._undo.pop_all()
        undo.callback(self.gpu.wait)
        self.gpu.use()
        undo.close()
