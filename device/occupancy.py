"""A rehearsal's occupancy: as many blocks a multiprocessor as on the GPU that is rehearsed.

A Hopper's has 228 KiB of shared memory, a GB10's 100: a block that fills a GB10's multiprocessor
would share a Hopper's with others. Knows sizes alone.
"""

from __future__ import annotations

from dataclasses import dataclass

RESERVED = 1024  # bytes of each block that the system takes
GRAIN = 128  # bytes in which shared memory is given


@dataclass(frozen=True)
class SharedMemoryScale:
    """Shared memory of a multiprocessor, bytes: of the GPU that is rehearsed, and of this one.

    `most`: what one block may have here.
    """

    theirs: int
    here: int
    most: int

    def dynamic(self, dynamic: int, static: int) -> int:
        """Bytes of dynamic shared memory with which a block has the same share of a multiprocessor
        here as it has there with `dynamic`, beside `static` of its own."""
        whole = (dynamic + static + RESERVED) * self.here // self.theirs // GRAIN * GRAIN
        return max(dynamic, min(whole - RESERVED, self.most) - static)
