"""Whether an engine fits the free memory; if not, an error with remedies.

Knows the manifest's plan; opens nothing, and looks up this host's GPUs only for the remedies.
"""

from spark_engine.errors import CapacityError
from spark_engine.manifest import NATIVE, Manifest
from spark_engine.runtime.engine.detect import present_card

GIB = 1 << 30


def check_capacity(
    manifest: Manifest, swap_bytes: int, available: int | None, kept: int = 0, ranks: int = 1
) -> None:
    """Raises CapacityError, with the numbers and remedies, when `ranks` ranks of the engine need
    more than the `available` bytes; `kept` bytes more are reserved for the host."""
    need = (manifest.memory.total + swap_bytes) * ranks
    if available is not None and need > available:
        m = manifest.memory
        parts = f"weights {m.weights / GIB:.2f}, KV pages {m.kv / GIB:.2f}, states "
        parts += f"{m.states / GIB:.2f}, tables {m.tables / GIB:.2f}, arena {m.arena / GIB:.2f}, "
        parts += f"buffers {m.buffers / GIB:.2f}, "
        parts += f"snapshots {m.snapshots / GIB:.2f}, " if m.snapshots else ""
        card = f", built for the card {manifest.card}," if manifest.card else ""
        less = " or snapshots (--cache-gib)" if m.snapshots else ""
        name, gpus = present_card()
        more = manifest.executor == NATIVE and gpus > manifest.ranks
        less += ", or for more GPUs of this host (--tp)" if more else ""
        here = "for this card (--card), or " if manifest.card and manifest.card != name else ""
        each = f", for each of {ranks} ranks" if ranks > 1 else ""
        host = f" next to the {kept / GIB:.2f} that this machine itself keeps" if kept else ""
        raise CapacityError(
            f"engine {manifest.name}{card} needs {need / GIB:.2f} GiB ({parts}swap "
            f"{swap_bytes / GIB:.2f}{each}) and {available / GIB:.2f} GiB are free{host}: stop "
            f"other programs, or rebuild {here}with a smaller --kv-tokens, --max-context or "
            f"--max-seqs, or with fewer buckets (--decode, --prefill){less}"
        )
