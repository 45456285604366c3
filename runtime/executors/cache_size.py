"""Memory limits of the prefix cache.

Input: the manifest's memory plan and the free memory beyond it. Knows no device and no cache.
"""

from dataclasses import dataclass

from spark_engine.device.shared_memory import kept_of
from spark_engine.manifest import PAGE, SEQUENCE, Manifest, bytes_of

SHARE, SHARED = 2, 4  # of free memory beyond the plan: 1/2, or 1/4 of shared memory
MOST = 4  # at most 1/4 of the device's memory
SPARE = 1 << 30  # bytes kept free next to a given budget, for cubins, graphs and the driver


@dataclass(frozen=True)
class GpuMemory:
    """A device's memory in bytes. `shared`: the host uses the same memory and keeps `host` bytes of
    it (None: the default)."""

    free: int
    total: int
    shared: bool = False
    host: int | None = None

    @property
    def kept(self) -> int:
        return kept_of(self.total, self.host) if self.shared else 0

    @property
    def usable(self) -> int:
        return max(0, self.free - self.kept)


def device_rows(manifest: Manifest, available: GpuMemory, requested: int | None) -> int:
    """Snapshot rows to allocate in addition to the plan. `requested`: the cache's budget in bytes,
    or None.

    The plan contains the pages, so snapshot rows may use the whole budget. Rows that do not fit are
    not allocated.
    """
    row, beyond = bytes_of(manifest.states, SEQUENCE), available.usable - manifest.memory.total
    if not row:
        return 0
    share = beyond // (SHARED if available.shared else SHARE)
    asked = (
        min(share, available.total // MOST) if requested is None else min(requested, beyond - SPARE)
    )
    return max(0, asked) // row


def budget(manifest: Manifest, rows: int, requested: int | None) -> int:
    """Maximum bytes of pages and snapshots in the cache together; all without `requested`."""
    if requested is not None:
        return requested
    pages = manifest.limits.pages * bytes_of(manifest.states, PAGE)
    return pages + rows * bytes_of(manifest.states, SEQUENCE)
