"""Defaults from a GPU's memory: the number of sequences, the context, KV pages, snapshots.

    SHARE of the memory = weights + WORKSPACE + rows of images + states of all sequences + KV pages
                          + snapshots

Knows numbers of the model and the target; knows no graph. Assumes that the weights take the
checkpoint's bytes plus 5 %, which bounds padding. The recurrent states take at most half of what
the weights leave: the number of sequences is reduced until they fit. The rest is for KV pages and
the prefix cache's snapshots.
"""

from dataclasses import dataclass

from spark_engine.kernel import Target

SHARE = 0.9
WEIGHTS = 1.05
WORKSPACE = 4 << 30  # bytes: arena, logits of the largest bucket, cubins, the driver's context
MAX_SEQS = 128
MAX_CONTEXT = 32_768  # tokens
PREFILL = (64, 128, 256, 512, 1024)  # tokens
CACHE = 4  # snapshots take at most a quarter of the rest, and one row for each sequence
# Snapshots of CPU engines: the least rows, rows for each sequence, and the most bytes. Few, because
# opening a bucket copies them all once.
CPU_FEW, CPU_EACH, CPU_CACHE = 16, 4, 1 << 30
MOST_SNAPSHOTS = 4096  # the most rows that are allocated for snapshots
LARGE_PREFILL = (*PREFILL, 2048, 4096)  # where shared memory is large, as on Hopper


@dataclass(frozen=True)
class Needs:
    """Bytes: of the checkpoint, of one sequence's states, of one KV page; of one snapshot, and of
    the rows of images."""

    weights: int
    slot: int
    page: int
    snapshot: int = 0
    images: int = 0


def free_bytes(target: Target, needs: Needs) -> int:
    """Bytes that weights and workspace leave; zero or negative if they do not fit."""
    return int(SHARE * target.card.memory - WEIGHTS * needs.weights) - WORKSPACE - needs.images


def sequences(target: Target, needs: Needs) -> int:
    """Concurrent sequences: MAX_SEQS, halved until their states fit."""
    most = MAX_SEQS
    while most > 1 and (most + 1) * needs.slot > free_bytes(target, needs) // 2:
        most //= 2
    return most


def pages(target: Target, needs: Needs, seqs: int, cache: int | None = None) -> int:
    """KV pages, scratch included, that fit with the states of `seqs` sequences and `cache` bytes of
    snapshots."""
    left = free_bytes(target, needs) - (seqs + 1) * needs.slot
    kept = min(max(0, left) // CACHE, seqs * needs.snapshot) if cache is None else cache
    return max(0, (left - kept) // max(1, needs.page) - 1)


def cpu_snapshots(needs: Needs, seqs: int, cache: int | None = None) -> int:
    """Snapshot rows of CPU engines, within `cache` bytes if given."""
    if not needs.snapshot:
        return 0
    if cache is not None:
        return min(MOST_SNAPSHOTS, cache // needs.snapshot)
    return min(max(CPU_FEW, CPU_EACH * seqs), CPU_CACHE // needs.snapshot)


def prefill(target: Target, experts: bool = False) -> tuple[int, ...]:
    """Tokens of the default buckets. Of 8,192 tokens each of 256 experts has two whole tiles."""
    large = (*LARGE_PREFILL, 8192) if experts else LARGE_PREFILL
    return large if target.large_shared else PREFILL
