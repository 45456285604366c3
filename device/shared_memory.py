"""What a host's programs may take where its first GPU has no memory but the host's (a DGX Spark).

Knows that memory's size by the driver, which it asks without opening the GPU; without the extra
`cuda`, a driver or a GPU nothing is shared.
"""

from __future__ import annotations

from dataclasses import dataclass

# Bytes that the host keeps of a memory that it shares: its services and desktop, the server's own
# processes, the files being read. A host without them does not fail a call, it stops answering.
KEPT, LEAST_KEPT = 10 << 30, 10  # and no more than a tenth, of a small memory


@dataclass(frozen=True)
class HostRoom:
    """Bytes of the host: `usable` ones, None where Linux does not tell, beside those that are
    `kept` for the host itself. `shared`: they are the GPU's as well."""

    usable: int | None
    kept: int
    shared: bool


def kept_of(total: int, asked: int | None = None) -> int:
    """Bytes that the host keeps of a memory of so many that it shares; `asked`: those that the user
    wants it to keep, None for the default."""
    return min(KEPT, total // LEAST_KEPT) if asked is None else asked


def host_room(available: int | None, asked: int | None = None) -> HostRoom:
    """Of the bytes that are `available` (host_memory.py) those that may be taken; `asked` as for
    `kept_of`."""
    total = _shared_bytes()
    kept = 0 if total is None else kept_of(total, asked)
    usable = None if available is None else max(0, available - kept)
    return HostRoom(usable, kept, total is not None)


def _shared_bytes() -> int | None:
    try:
        from spark_engine.device.gpu import shared_bytes
    except ImportError:  # without the extra `cuda`
        return None
    return shared_bytes()
