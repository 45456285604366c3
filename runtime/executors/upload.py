"""Copies a file into device memory: several threads read it once and hash it while they copy.

The copies are on their own stream, so that graphs can be recorded meanwhile.

Knows files, pinned memory and chunks; knows no contents and no expected digests. If the device
shares the host's memory, pages that were read are dropped from the page cache, so that the weights
are not in memory twice.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from spark_engine.device.gpu import Event, Gpu, Stream
from spark_engine.device.resources import DeviceResources
from spark_engine.errors import EngineError
from spark_engine.tensors import Bytes

PIECE = 4 << 20  # bytes read, copied and hashed at once: fits the core's cache
STAGES = 2  # pieces per thread: one is copied while the next one is read
MAX_LANES = 16  # threads; fewer saturate PCIe
Check = Callable[[int, str], None]  # (chunk index, hex sha256); raises on a mismatch


class Upload:
    """Copies a whole file into device memory at `address`, which `resources` frees.

    Threads read and hash `chunk` bytes at a time and pass the digest to `check`; its error ends
    the upload. The file's bytes may be used after `wait`. `lanes`: threads, 0 for one per core.
    """

    def __init__(
        self, resources: DeviceResources, path: Path, chunk: int, check: Check, lanes: int = 0
    ) -> None:
        size = path.stat().st_size
        chunks = -(-size // chunk)
        lanes = max(1, min(lanes or os.cpu_count() or 1, MAX_LANES, chunks))
        self.address = resources.memory(size)
        self._path, self._size, self._gpu = path, size, resources.gpu
        self._own = DeviceResources(resources.gpu)
        try:
            stream = self._own.stream()
            stages = self._own.pinned(lanes * STAGES * PIECE).reshape(lanes, STAGES, PIECE)
            copied = [[self._own.event() for _ in range(STAGES)] for _ in range(lanes)]
        except BaseException:
            self._own.close()
            raise
        self._job = _Job(resources.gpu, stream, path, size, chunk, self.address, check)
        self._pool = ThreadPoolExecutor(lanes, "upload")
        self._lanes = [self._pool.submit(self._job.run, stages[i], copied[i]) for i in range(lanes)]

    def wait(self) -> int:
        """Returns the address once all bytes are there. Raises what `check` raised, and EngineError
        if the file was truncated meanwhile."""
        try:
            for lane in self._lanes:
                lane.result()
        finally:  # KeyboardInterrupt too: the pool waits for its threads
            self.close()
        if self._gpu.integrated:  # drops pages that readahead loaded after their range was dropped
            with self._path.open("rb") as file:
                _drop(file.fileno(), 0, self._size)
        return self.address

    def close(self) -> None:
        """Ends the threads, each after its current chunk. May be called twice."""
        self._job.stop()
        self._pool.shutdown()
        self._own.close()


def _drop(file: int, at: int, size: int) -> None:
    os.posix_fadvise(file, at, size, os.POSIX_FADV_DONTNEED)


class _Job:
    """State of one upload, shared by its threads."""

    def __init__(
        self,
        gpu: Gpu,
        stream: Stream,
        path: Path,
        size: int,
        chunk: int,
        address: int,
        check: Check,
    ) -> None:
        self._gpu, self._stream, self._path, self._size = gpu, stream, path, size
        self._chunk, self._address, self._check = chunk, address, check
        self._starts: Iterator[int] = iter(range(0, size, chunk))  # `next` of a range is atomic
        self._stopped = False
        self._drops = gpu.integrated

    def stop(self) -> None:
        """Lets every thread end after its current chunk."""
        self._stopped = True

    def run(self, stages: Bytes, copied: list[Event]) -> None:
        """Processes chunks until none is left or another thread has failed."""
        self._gpu.use()
        try:
            with self._path.open("rb", buffering=0) as file:
                for start in self._starts:
                    if self._stopped:
                        return
                    digest = self._move(file.fileno(), start, stages, copied)
                    self._check(start // self._chunk, digest)
        except BaseException:
            self._stopped = True
            raise
        finally:  # copies that are queued read the stages
            for event in copied:
                self._gpu.wait_for(event)

    def _move(self, file: int, start: int, stages: Bytes, copied: list[Event]) -> str:
        digest = hashlib.sha256()
        end = min(start + self._chunk, self._size)
        for turn, at in enumerate(range(start, end, PIECE)):
            stage = stages[turn % STAGES][: min(PIECE, end - at)]
            self._gpu.wait_for(copied[turn % STAGES])
            self._read(file, at, stage)
            self._gpu.upload(self._address + at, stage, self._stream)
            self._gpu.record(copied[turn % STAGES], self._stream)
            digest.update(stage)
            if self._drops:
                _drop(file, at, len(stage))
        return digest.hexdigest()

    def _read(self, file: int, at: int, stage: Bytes) -> None:
        view = stage.data
        while view:
            count = os.preadv(file, [view], at)
            if not count:
                raise EngineError(
                    f"{self._path} was truncated while it was read; rebuild the engine"
                )
            view, at = view[count:], at + count
