"""A GPU made of numpy, which keeps the driver's promises and no more.

Memory by address, copies and launches in order, graphs that replay what was recorded. What is
queued runs as late as the driver may run it: when something waits for it. Its kernels are Python
functions found by symbol, called as `kernel(gpu, *args)`. `calls` holds the names of the calls.
`held` counts what was made and not freed.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from itertools import pairwise
from typing import Any

import numpy as np

from spark_engine.errors import ExecutorError
from spark_engine.kernel import Shape
from spark_engine.tensors import Array

Kernel = Callable[..., None]
KINDS = ("memory", "pinned", "events", "graphs", "streams", "modules", "contexts")
NOTHING = dict.fromkeys(KINDS, 0)


class Event:
    """An event; its identity distinguishes it from others."""


class FakeGpu:
    """`kernels` by symbol; every cubin holds all of them. `fails`: the call, counted from 0, of
    those that make or queue something, that raises."""

    free_bytes, total_bytes, integrated = 1 << 30, 4 << 20, False
    shared_by_mps, registers = False, True
    multiprocessors = 132
    per_multiprocessor = 1  # blocks, of any kernel

    def __init__(self, kernels: Mapping[str, Kernel], fails: int = -1) -> None:
        self.kernels = copy(kernels)
        self.blocks: dict[int, Any] = {}
        self.taken = 0  # bytes of device memory
        self.next = 1 << 20
        self.recording: list[Callable[[], None]] | None = None
        self.calls: list[str] = []
        self.uploads: list[tuple[int, int]] = []  # address, bytes
        self.modules: list[bytes] = []
        self.allowed: dict[str, int] = {}
        self.closed = False
        self.made = 0
        self._fails = fails
        self._pinned: dict[int, Any] = {}  # by address
        self._events: set[Event] = set()
        self._graphs: list[Any] = []
        self._streams: list[object] = []
        self._queue: deque[object] = deque()
        self._lock = threading.RLock()

    @property
    def held(self) -> dict[str, int]:
        """How many things of each kind were not freed."""
        made = self.blocks, self._pinned, self._events, self._graphs, self._streams
        modules = 0 if self.closed else len(self.modules)
        counts = (*map(len, made), modules, int(not self.closed))
        return dict(zip(KINDS, counts, strict=True))

    def allocate(self, nbytes: int) -> int:
        self._make("allocate")
        address, self.next = self.next, self.next + nbytes + 4096
        self.blocks[address] = np.full(max(nbytes, 1), 0xEE, np.uint8)
        self.taken += nbytes
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
        self._make("pinned")
        memory = np.full(max(nbytes, 1), 0xDD, np.uint8)[:nbytes]
        self._pinned[memory.ctypes.data] = memory
        return memory

    def unpin(self, memory: Any) -> None:
        del self._pinned[memory.ctypes.data]

    def register(self, memory: Any) -> None:
        self._make("register")
        self._pinned[memory.ctypes.data] = memory

    unregister = unpin

    def upload(self, address: int, array: Array, stream: object | None = None) -> None:
        assert isinstance(array, np.ndarray) and array.flags.c_contiguous
        assert stream is not None or self.recording is None, "it would become a part of the graph"
        self._make("upload")
        self.uploads.append((address, array.nbytes))
        raw = array.reshape(-1).view(np.uint8)
        self._add(lambda: np.copyto(self.at(address, array.nbytes), raw))

    def download(self, array: Array, address: int) -> None:
        assert isinstance(array, np.ndarray) and array.flags.c_contiguous
        self._make("download")
        raw = array.reshape(-1).view(np.uint8)
        self._add(lambda: np.copyto(raw, self.at(address, array.nbytes)))

    def copy(self, to: int, source: int, nbytes: int) -> None:
        self._make("copy")
        self._add(lambda: np.copyto(self.at(to, nbytes), self.at(source, nbytes)))

    def copy_all(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """In no order: nothing may be read that another copy writes, or be written twice."""
        self._make("copy_all")
        written = sorted((to, to + nbytes) for to, _, nbytes in copies)
        assert all(end <= start for (_, end), (start, _) in pairwise(written))
        for _, source, nbytes in copies:
            assert not any(source < end and start < source + nbytes for start, end in written)
        for one in reversed(copies):
            self.copy(*one)

    def fill(self, address: int, byte: int, nbytes: int) -> None:
        self._make("fill")
        self._add(lambda: self.at(address, nbytes).fill(byte))

    def module(self, cubin: bytes) -> bytes:
        self._make("module")
        self.modules.append(cubin)
        return cubin

    def function(self, module: bytes, symbol: str) -> str:
        self._make("function")
        assert module in self.modules
        return symbol

    def load_function(self, function: str) -> None:
        self._make("load_function")

    def allow_shared(self, function: str, nbytes: int) -> None:
        self._make("allow_shared")
        self.allowed[function] = nbytes

    def resident_blocks(self, function: str, shape: Shape) -> int:
        return self.per_multiprocessor * self.multiprocessors

    def pack(
        self, values: Sequence[int], kinds: Sequence[str], uses: Sequence[Sequence[int]]
    ) -> list[tuple[int, ...]]:
        assert len(kinds) == len(values)
        return [tuple(values[i] for i in one) for one in uses]

    def prepare(self, function: str, shape: Shape, args: Sequence[int]) -> Callable[[], None]:
        def run() -> None:
            self.kernels[function](self, *args)

        def queue() -> None:
            if self._fails >= 0:  # launches are counted where failing is tried, and not in `calls`
                self._make("launch")
            self._add(run) if self.recording is None else self.recording.append(run)

        return queue

    def begin_capture(self) -> None:
        self._make("capture")
        self.recording = []

    def end_capture(self) -> list[Callable[[], None]]:
        recorded, self.recording = self.recording, None
        assert recorded is not None
        self._make("instantiate")
        self._graphs.append(recorded)
        return recorded

    def drop_capture(self) -> None:
        self.recording = None

    def destroy_graph(self, graph: list[Callable[[], None]]) -> None:
        self._graphs.remove(graph)

    def replay(self, graph: list[Callable[[], None]]) -> None:
        self._make("replay")
        for launch in graph:
            self._add(launch)

    def event(self, timed: bool = False) -> Event:
        self._make("event")
        event = Event()
        self._events.add(event)
        return event

    def destroy_event(self, event: Event) -> None:
        self._events.remove(event)

    def new_stream(self) -> object:
        self._make("stream")
        self._streams.append(object())
        return self._streams[-1]

    def destroy_stream(self, stream: object) -> None:
        self._streams.remove(stream)

    def record(self, event: Event, stream: object | None = None) -> None:
        assert event in self._events
        assert stream is None or stream in self._streams
        self._make("record")
        self._add(event)

    def mark(self, event: Event) -> None:
        assert event in self._events and self.recording is not None
        self._make("mark")
        self.recording.append(lambda: self.reached(event))

    def reached(self, event: Event) -> None:
        """A replay is at an event that is a part of its graph."""

    def wait_for(self, event: Event) -> None:
        assert event in self._events
        self.calls.append("blocks" if event in self._queue else "passes")
        with self._lock:
            while event in self._queue:
                self._next()

    def wait(self) -> None:
        assert not self.closed and self.recording is None
        self.calls.append("wait")
        with self._lock:
            while self._queue:
                self._next()

    def use(self) -> None:
        assert not self.closed, "the context is gone"

    def close(self) -> None:
        assert not self.closed
        self.closed = True

    def _make(self, call: str) -> None:
        with self._lock:
            self.calls.append(call)
            self.made += 1
            if self.made - 1 == self._fails:
                raise ExecutorError(f"call {self._fails} failed, {call}")

    def _add(self, work: object) -> None:
        with self._lock:
            self._queue.append(work)

    def _next(self) -> None:
        work = self._queue.popleft()
        if callable(work):
            work()
