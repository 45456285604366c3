"""Copies a file into device memory: a process reads it once and hashes it, a thread copies it.

The process (`read_process.py`) has Python's lock for itself, and the copies are on their own
stream, so that buckets are opened and graphs recorded meanwhile as fast as without them.

Knows files, pinned memory and chunks; knows no contents and no expected digests. If the device
shares the host's memory, pages that were read are dropped from the page cache, so that the weights
are not in memory twice.
"""

import mmap
import os
import select
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import numpy as np

from spark_engine.device.resources import DeviceResources
from spark_engine.errors import EngineError
from spark_engine.runtime.executors import read_process
from spark_engine.runtime.executors.read_process import RECORD

PIECE = 8 << 20  # bytes copied at once
MAX_LANES = 16  # threads that read; fewer saturate PCIe
SPARE = 4  # pieces that are copied while every thread reads another one
OWN_CORES = 2  # for the threads that open buckets and copy
MOST_RECORDS = SPARE  # with one event; all at once, threads would wait for one another
Check = Callable[[int, str], None]  # (chunk index, hex sha256); raises on a mismatch


class Upload:
    """Copies a whole file into device memory at `address`, which `resources` frees.

    `chunk` bytes at a time are hashed, and the digest is passed to `check`; its error ends the
    upload. The file's bytes may be used after `wait`. `lanes`: threads that read, 0 for one per
    core but OWN_CORES.
    """

    def __init__(
        self, resources: DeviceResources, path: Path, chunk: int, check: Check, lanes: int = 0
    ) -> None:
        self._path, self._size, self._gpu = path, path.stat().st_size, resources.gpu
        self._chunk, self._check = chunk, check
        lanes = lanes or (os.cpu_count() or 1) - OWN_CORES
        lanes = max(1, min(lanes, MAX_LANES, -(-self._size // chunk)))
        self.address = resources.memory(self._size)
        self._own = DeviceResources(resources.gpu)
        try:
            self._reader = self._start(lanes, lanes + SPARE)
        except BaseException:
            self._own.close()
            raise
        self._pool = ThreadPoolExecutor(1, "upload")
        self._copying = self._pool.submit(self._run)

    def _start(self, lanes: int, slots: int) -> subprocess.Popen[bytes]:
        """The process, with memory of so many slots and with pipes; it reads the first pieces while
        the memory is page-locked."""
        with ExitStack() as passed:  # the process has its own
            memory = os.memfd_create("weights")
            passed.callback(os.close, memory)
            os.ftruncate(memory, slots * PIECE)
            self._slots = np.frombuffer(mmap.mmap(memory, 0), np.uint8).reshape(slots, PIECE)
            free, self._free = os.pipe()
            self._ready, ready = os.pipe()
            for mine, other in ((self._free, free), (self._ready, ready)):
                self._own.finally_(partial(os.close, mine))
                passed.callback(os.close, other)
            os.write(self._free, bytes(range(slots)))
            numbers = self._chunk, PIECE, lanes, int(self._gpu.integrated), memory, free, ready
            script = [sys.executable, "-I", "-S", str(read_process.__file__), str(self._path)]
            reader = subprocess.Popen([*script, *map(str, numbers)], pass_fds=(memory, free, ready))
        self._own.finally_(partial(_end, reader))
        self._own.pin(self._slots)
        self._stream = self._own.stream()
        self._copied = [self._own.event() for _ in range(slots)]
        return reader

    def wait(self) -> int:
        """Returns the address once all bytes are there. Raises what `check` raised, and EngineError
        if the file was truncated meanwhile or cannot be read."""
        try:
            self._copying.result()
        finally:  # KeyboardInterrupt too
            self.close()
        if self._gpu.integrated:  # drops pages that readahead loaded after their range was dropped
            with self._path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, self._size, os.POSIX_FADV_DONTNEED)
        return self.address

    def close(self) -> None:
        """Ends the process and the thread. May be called twice."""
        _end(self._reader)  # then the thread finds the end of its pipe
        self._pool.shutdown()
        self._own.close()

    def _run(self) -> None:
        """Copies pieces as they come, until the file is there. Those that came together have one
        event: for each call to the driver this thread waits for Python's lock."""
        self._gpu.use()
        left, flying = self._size, deque[list[int]]()  # slots that are being copied, in order
        try:
            while left or flying:
                if left and (not flying or select.select([self._ready], [], [], 0)[0]):
                    flying.append([])
                    for slot, count, at, digest in self._pieces():
                        flying[-1].append(slot)
                        self._copy(slot, count, at, digest)
                        left -= count
                    self._gpu.record(self._copied[flying[-1][0]], self._stream)
                else:
                    self._gpu.wait_for(self._copied[flying[0][0]])
                    with suppress(BrokenPipeError):  # the process has read everything
                        os.write(self._free, bytes(flying.popleft()))
        finally:  # copies that are queued read the slots
            if flying:
                self._gpu.record(self._copied[0], self._stream)
                self._gpu.wait_for(self._copied[0])

    def _pieces(self) -> Iterator[tuple[int, int, int, bytes]]:
        """The records of the pieces that are read; waits for one."""
        data = os.read(self._ready, MOST_RECORDS * RECORD.size)
        if not data:
            raise EngineError(
                f"{self._path} was not read to its end: the process that reads it ended with code "
                f"{self._reader.wait()}; start the engine again"
            )
        return RECORD.iter_unpack(data)

    def _copy(self, slot: int, count: int, at: int, digest: bytes) -> None:
        index, end = at // self._chunk, at + count
        last = min((index + 1) * self._chunk, self._size)
        if end < min(at + PIECE, last):
            raise EngineError(f"{self._path} was truncated while it was read; rebuild the engine")
        self._gpu.upload(self.address + at, self._slots[slot, :count], self._stream)
        if end == last:
            self._check(index, digest.hex())


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
