"""A GPU made of numpy, which keeps the driver's promises and no more.

Memory by address, copies and launches in order, graphs that replay what was recorded. What is
queued runs as late as the driver may run it: when something waits for it. Its kernels are Python
functions found by symbol, called as `kernel(gpu, *args)`. `calls` holds the names of the calls.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from spark_engine.kernel import Shape
from spark_engine.tensors import Array

Kernel = Callable[..., None]


class FakeGpu:
    """`kernels` by symbol; every cubin holds all of them."""

    free_bytes = 1 << 30
    multiprocessors = 132

    def __init__(self, kernels: Mapping[str, Kernel]) -> None:
        self.kernels = kernels
        self.blocks: dict[int, Any] = {}
        self.next = 1 << 20
        self.recording: list[Callable[[], None]] | None = None
        self.calls: list[str] = []
        self.uploads: list[tuple[int, int]] = []  # address, bytes
        self.modules: list[bytes] = []
        self.allowed: dict[str, int] = {}
        self.closed = False
        self._queue: deque[object] = deque()
        self._lock = threading.RLock()

    def allocate(self, nbytes: int) -> int:
        self.calls.append("allocate")
        address, self.next = self.next, self.next + nbytes + 4096
        self.blocks[address] = np.full(max(nbytes, 1), 0xEE, np.uint8)
        return address

    def free(self, address: int) -> None:
        self.wait()
        del self.blocks[address]

    def at(self, address: int, nbytes: int) -> Any:
        base = max(b for b in self.blocks if b <= address)
        part = self.blocks[base][address - base : address - base + nbytes]
        assert len(part) == nbytes, "access beyond an allocation"
        return part

    def view(self, address: int, dtype: Any, dims: tuple[int, ...]) -> Any:
        nbytes = int(np.prod(dims)) * np.dtype(dtype).itemsize
        return self.at(address, nbytes).view(dtype).reshape(dims)

    def pinned(self, nbytes: int) -> Any:
        self.calls.append("pinned")
        return np.full(nbytes, 0xDD, np.uint8)

    def upload(self, address: int, array: Array) -> None:
        assert isinstance(array, np.ndarray) and array.flags.c_contiguous
        self.calls.append("upload")
        self.uploads.append((address, array.nbytes))
        raw = array.reshape(-1).view(np.uint8)
        self._add(lambda: np.copyto(self.at(address, array.nbytes), raw))

    def download(self, array: Array, address: int) -> None:
        assert isinstance(array, np.ndarray) and array.flags.c_contiguous
        self.calls.append("download")
        raw = array.reshape(-1).view(np.uint8)
        self._add(lambda: np.copyto(raw, self.at(address, array.nbytes)))

    def fill(self, address: int, byte: int, nbytes: int) -> None:
        self.calls.append("fill")
        self._add(lambda: self.at(address, nbytes).fill(byte))

    def module(self, cubin: bytes) -> bytes:
        self.modules.append(cubin)
        return cubin

    def function(self, module: bytes, symbol: str) -> str:
        assert module in self.modules
        return symbol

    def allow_shared(self, function: str, nbytes: int) -> None:
        self.allowed[function] = nbytes

    def prepare(self, function: str, shape: Shape, args: Sequence[int]) -> Callable[[], None]:
        def run() -> None:
            self.kernels[function](self, *args)

        return lambda: self._add(run) if self.recording is None else self.recording.append(run)

    def begin_capture(self) -> None:
        self.recording = []

    def end_capture(self) -> list[Callable[[], None]]:
        recorded, self.recording = self.recording, None
        assert recorded is not None
        return recorded

    def replay(self, graph: list[Callable[[], None]]) -> None:
        self.calls.append("replay")
        for launch in graph:
            self._add(launch)

    def event(self) -> object:
        self.calls.append("event")
        return object()

    def record(self, event: object) -> None:
        self.calls.append("record")
        self._add(event)

    def wait_for(self, event: object) -> None:
        self.calls.append("blocks" if event in self._queue else "passes")
        with self._lock:
            while event in self._queue:
                self._next()

    def wait(self) -> None:
        self.calls.append("wait")
        with self._lock:
            while self._queue:
                self._next()

    def close(self) -> None:
        self.closed = True

    def _add(self, work: object) -> None:
        with self._lock:
            self._queue.append(work)

    def _next(self) -> None:
        work = self._queue.popleft()
        if callable(work):
            work()

    def _nothing(self, *_: object) -> None:
        pass

    use = unpin = destroy_graph = _nothing
