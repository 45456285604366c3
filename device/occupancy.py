"""A rehearsal's occupancy: as many blocks per multiprocessor as on the rehearsed GPU.

A Hopper multiprocessor has 228 KiB of shared memory, a GB10 100 KiB: a block that fills one of a
GB10 would share a Hopper's with others. Knows sizes only.
"""

from dataclasses import dataclass

RESERVED = 1024  # bytes per block that the system reserves
GRAIN = 128  # bytes: unit of shared memory allocation


@dataclass(frozen=True)
class SharedMemoryScale:
    """Bytes of shared memory per multiprocessor: of the rehearsed GPU, and of this one.

    `most`: the limit of one block on this GPU.
    """

    theirs: int
    here: int
    most: int

    def dynamic(self, dynamic: int, static: int) -> int:
        """Bytes of dynamic shared memory with which a block takes the same part of a multiprocessor
        here as with `dynamic` on the rehearsed GPU; `static`: its static bytes."""
        whole = (dynamic + static + RESERVED) * self.here // self.theirs // GRAIN * GRAIN
        return max(dynamic, min(whole - RESERVED, self.most) - static)
