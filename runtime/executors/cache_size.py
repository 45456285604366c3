"""How much memory the prefix cache may have.

Knows the manifest's plan and what is free beyond it; knows no device and no cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from spark_engine.device.shared_memory import kept_of
from spark_engine.manifest import PAGE, SEQUENCE, Manifest, bytes_of

SHARE, SHARED = 2, 4  # of what is free beyond the plan: a half; a quarter where the host has it too
MOST = 4  # and never more than a quarter of the device's memory
SPARE = 1 << 30  # bytes left where a budget is given: cubins, graphs, the driver's own


@dataclass(frozen=True)
class GpuMemory:
    """A device's memory in bytes; `shared`: it is the host's as well, of which that keeps `host`
    (None: the default)."""

    free: int
    total: int
    shared: bool = False
    host: int | None = None

    @property
    def kept(self) -> int:
        """Bytes that are left to the host."""
        return kept_of(self.total, self.host) if self.shared else 0

    @property
    def usable(self) -> int:
        """Bytes that an engine may take."""
        return max(0, self.free - self.kept)


def device_rows(manifest: Manifest, room: GpuMemory, requested: int | None) -> int:
    """Snapshot rows to allocate beside the plan; `requested`: the cache's budget in bytes, if set.

    Pages lie in the plan, so all of the budget may become rows; what does not fit is not taken.
    """
    row, beyond = bytes_of(manifest.states, SEQUENCE), room.usable - manifest.memory.total
    if not row:
        return 0
    share = beyond // (SHARED if room.shared else SHARE)
    asked = min(share, room.total // MOST) if requested is None else min(requested, beyond - SPARE)
    return max(0, asked) // row


def budget(manifest: Manifest, rows: int, requested: int | None) -> int:
    """Bytes of pages and snapshots that the cache may hold together: as told, or all there are."""
    if requested is not None:
        return requested
    pages = manifest.limits.pages * bytes_of(manifest.states, PAGE)
    return pages + rows * bytes_of(manifest.states, SEQUENCE)
