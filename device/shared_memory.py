"""How much memory an engine may use if the GPU shares the host's memory (a DGX Spark).

Reads the size of that memory from the driver without opening the GPU; without the extra `cuda`, a
driver or a GPU nothing is shared.
"""

from dataclasses import dataclass

# Bytes of a shared memory that are reserved for the host: its services and desktop, the server's
# processes, the files being read. Without them no call fails, but the host stops responding.
KEPT, LEAST_KEPT = 10 << 30, 10  # at most a tenth of a small memory


@dataclass(frozen=True)
class HostBudget:
    """Bytes of host memory: `usable` by engines (None if Linux does not report it), and `kept` for
    the host itself. `shared`: the GPU uses the same memory."""

    usable: int | None
    kept: int
    shared: bool


def kept_of(total: int, asked: int | None = None) -> int:
    """Bytes reserved for the host of a shared memory of `total` bytes; `asked`: the user's figure,
    None for the default."""
    return min(KEPT, total // LEAST_KEPT) if asked is None else asked


def host_budget(available: int | None, asked: int | None = None) -> HostBudget:
    """The part of the `available` bytes (host_memory.py) that may be allocated; `asked` as for
    `kept_of`."""
    total = _shared_bytes()
    kept = 0 if total is None else kept_of(total, asked)
    usable = None if available is None else max(0, available - kept)
    return HostBudget(usable, kept, total is not None)


def _shared_bytes() -> int | None:
    try:
        from spark_engine.device.gpu import shared_bytes
    except ImportError:  # without the extra `cuda`
        return None
    return shared_bytes()
