"""Reads a file into shared memory and hashes it: a script in a separate process, so that it shares
no lock of Python with the process that opens an engine's buckets.

`python read_process.py FILE CHUNK SLOT LANES DROP MEMORY FREE READY`, of which the last three are
descriptors. Several threads read chunks of CHUNK bytes into slots of SLOT bytes of MEMORY. The pipe
FREE has the number of each free slot, a byte; READY gets a `RECORD` for each slot that is filled.
Pages that were read are dropped from the page cache if DROP is 1. Ends early when FREE is closed.
Knows no engine and no GPU, and imports nothing of the package.
"""

import hashlib
import mmap
import os
import struct
import sys
import threading
from collections.abc import Iterator

# The slot, bytes in it, the place of the first in the file, sha256 of its chunk with the last piece
# of that. Fewer bytes than a piece has: the file was truncated.
RECORD = struct.Struct("=IIQ32s")
READ = 4 << 20  # bytes read and hashed at once: fits the core's cache


class _Job:
    """What the threads share."""

    def __init__(self, path: str, chunk: int, slot: int, drop: bool, pipes: tuple[int, int, int]):
        memory, self._free, self._ready = pipes
        self._path, self._chunk, self._slot, self._drop = path, chunk, slot, drop
        self._size = os.stat(path).st_size
        self._memory = memoryview(mmap.mmap(memory, 0))
        self._starts: Iterator[int] = iter(range(0, self._size, chunk))  # its `next` is atomic

    def run(self) -> None:
        """Reads chunks until none is left. A fault ends the process."""
        try:
            with open(self._path, "rb", buffering=0) as file:
                while (start := next(self._starts, -1)) >= 0:
                    self._read_chunk(file.fileno(), start, min(start + self._chunk, self._size))
        except BrokenPipeError:  # the parent has ended
            os._exit(1)
        except BaseException as error:
            print(f"{self._path}: {error}", file=sys.stderr, flush=True)
            os._exit(1)

    def _read_chunk(self, file: int, at: int, end: int) -> None:
        digest = hashlib.sha256()
        while at < end:
            taken = os.read(self._free, 1)
            if not taken:
                os._exit(1)
            begin, wanted = taken[0] * self._slot, min(self._slot, end - at)
            count = self._fill(file, at, self._memory[begin : begin + wanted], digest)
            last = digest.digest() if at + count == end else b""
            os.write(self._ready, RECORD.pack(taken[0], count, at, last))
            if count < wanted:
                return
            at += count

    def _fill(self, file: int, at: int, view: memoryview, digest: "hashlib._Hash") -> int:
        """Reads and hashes as many bytes as there are; returns how many."""
        done = 0
        while done < len(view):
            count = os.preadv(file, [view[done : done + READ]], at + done)
            if not count:
                break
            digest.update(view[done : done + count])
            if self._drop:
                os.posix_fadvise(file, at + done, count, os.POSIX_FADV_DONTNEED)
            done += count
        return done


def main() -> None:
    """The command line."""
    path, numbers = sys.argv[1], [int(word) for word in sys.argv[2:]]
    chunk, slot, lanes, drop, *pipes = numbers
    memory, free, ready = pipes
    job = _Job(path, chunk, slot, bool(drop), (memory, free, ready))
    threads = [threading.Thread(target=job.run) for _ in range(lanes)]
    for thread in threads:
        thread.start()


if __name__ == "__main__":
    main()
