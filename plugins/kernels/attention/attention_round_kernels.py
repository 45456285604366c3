"""The tactics of decode attention: rows of one token, and rounds of drafts of two to eight.

Each is one launch. A round's sums have one token's order. A team of warps reads one copy of a tile
of keys for several queries, the most that registers and shared memory allow. Sizes mirror `struct
Block` of attention_merge.cuh and `Weights` of attention_warp_team.cuh.
"""

from dataclasses import dataclass, replace
from functools import partial

from spark_engine.kernel import Plan, Target
from spark_engine.plugins.kernels.attention import attention_decode_kernels as one_token
from spark_engine.plugins.kernels.attention.attention_decode_kernels import (
    ARGS,
    COLUMNS,
    RESIDENT,
    ROW,
    TYPICAL,
    epilogue,
    grouped_sizes,
    most_warps,
    pages_macros,
    readers_of,
    refuse_group,
    sizes,
    stages_alone,
    token_bytes,
    with_sums,
)
from spark_engine.plugins.launch import Candidate, Kernel, Node
from spark_engine.plugins.state.paged_kv import ROUND, Sizes
from spark_engine.plugins.tuning import sm_90a, sm_121a
from spark_engine.plugins.tuning.sizes import FAN, Chunks

ROUNDED = Kernel("paged_round", ARGS, source="attention/attention_round_mma.cu")
RUN_LIST_BYTES = 11 << 10  # of a block's shared memory, for its list of runs
TEAM_STAGES = {1: (), 2: (4, 3), 4: (6, 4, 3)}  # tiles of a team's ring; the first that fits
TEAM_MIN_DIM = 128  # dimensions of a head of a team, at least
WHY = "nodes of one token or of a round that no fusion takes, and --no-fuse"
WEIGHTS = 512  # bytes of a team for each query; twice that if values lag by a tile


def runs_of(tile: int, queries: int) -> int:
    """Entries of a row in the list of runs: the chunk size changes at most twice in a row, and
    queries that the row lacks are a run too."""
    return min(tile, -(-tile // queries) + 3)


def queries_of(node: Node, size: Chunks) -> int:
    """Queries that a team of warps shares: the most that read a row less often than half of them,
    and for which there are registers and shared memory."""
    s, target = sizes(node), node.target
    return next(
        n
        for n in sorted(TEAM_STAGES, reverse=True)
        if n == 1
        or s.tile > n // 2
        and s.dim >= TEAM_MIN_DIM
        and n * size.warps <= most_warps(target)
        and _shared(node, size, n) <= target.shared_bytes
    )


def refuse(node: Node, size: Chunks) -> str | None:
    """Why no kernel takes the node, or None."""
    s, target = sizes(node), node.target
    if s.tile > ROUND:
        return f"rows are of {s.tile} tokens, not of 1 to {ROUND}"
    reason, shared = refuse_group(node, size), _shared(node, size, 1)
    if reason is None and shared > target.shared_bytes:
        return f"{size.warps} warps take {shared} bytes of shared memory; {target.name} has less"
    return reason


def _shared(node: Node, size: Chunks, queries: int) -> int:
    """Bytes of shared memory of a block with teams of so many queries."""
    s = sizes(node)
    if s.tile == 1:
        return one_token.shape(s, size.warps)[2] + ROW * node.dim("rows")
    return _shape(s, node.target, size.warps, queries).shared + _listed(s, node, queries)


def _listed(s: Sizes, node: Node, queries: int) -> int:
    """Bytes of the list of runs."""
    return ROW * node.dim("rows") * runs_of(s.tile, queries)


@dataclass(frozen=True)
class Shape:
    """A block: rings of tiles, tiles of a ring, queries of a merge, bytes without the runs."""

    readers: int
    stages: int
    merge_batch: int
    shared: int


def _shape(s: Sizes, target: Target, most: int, queries: int) -> Shape:
    """The first form that leaves shared memory for the other blocks of a multiprocessor: deep rings
    and all queries merged at once; else a single warp's ring and one query a merge."""
    token, readers = token_bytes(s), readers_of(s, most)

    def made(stages: int, merge_batch: int) -> Shape:
        weights = WEIGHTS * queries * (1 + (stages > 2)) if queries > 1 else 0
        arena = max(stages * 2 * 16 * token + weights, merge_batch * COLUMNS * (s.dim + 4) * 4)
        heads = queries * COLUMNS * (s.dim + 8) * 2
        rest = heads + 2 * s.tile * token + merge_batch * readers * COLUMNS * 8
        return Shape(readers, stages, merge_batch, readers * arena + rest + 80)

    alone = stages_alone(s)
    blocks = max(1, RESIDENT // (readers * queries))
    free = (target.shared_bytes + 1024) // blocks - 1024 - RUN_LIST_BYTES
    deeper = TEAM_STAGES[queries] if target.large_shared else ()
    forms = [made(stages, queries) for stages in (*deeper, alone)]
    return next((f for f in forms if f.shared <= free), made(alone, 1))


def plan(node: Node, chunks: Chunks) -> Plan:
    """A grid of the resident blocks; scratch memory for the partial sums of every chunk."""
    s, rows, target = grouped_sizes(node), node.dim("rows"), node.target
    queries = queries_of(node, chunks)
    shape = _shape(s, target, chunks.warps, queries)
    readers, shared = shape.readers, shape.shared
    listed, runs = _listed(s, node, queries), runs_of(s.tile, queries)
    blocks = _resident(target, chunks.warps, readers * queries, queries, shared + listed)
    most_chunks = min(chunks.most, -(-node.dim("MP") * s.page // chunks.tokens))
    items = rows * runs * s.kv_heads * most_chunks
    macros = {
        **pages_macros(node, s.heads),
        "TOKENS": s.tile,
        "QUERIES": queries,
        "READERS": readers,
        "WARPS": readers * queries,
        "STAGES": shape.stages,
        "MERGE_BATCH": shape.merge_batch,
        "CHUNK": chunks.tokens,
        "MOST_CHUNKS": chunks.most,
        "BLOCKS": blocks,
        "SHARED": shared,
        **epilogue(node),
    }
    sums = rows * s.tile * s.kv_heads * most_chunks * s.group
    node = with_sums(node, sums, rows * runs * s.kv_heads)
    launch = ROUNDED.launch(
        node, min(items, target.sms * blocks), 32 * readers * queries, macros, shared + listed,
        rows=rows, longest=node.dim("MP"),
    )  # fmt: skip
    return node.plan(launch)


def _resident(target: Target, most: int, warps: int, queries: int, shared: int) -> int:
    """Blocks of a multiprocessor; the hardware reserves 1 KiB a block."""
    by_warps = RESIDENT // (most if queries == 1 else warps)
    return max(1, min(by_warps, (target.shared_bytes + 1024) // (shared + 1024)))


def cost(node: Node, size: Chunks) -> float:
    """Seconds, as of one token; every run reads its row again."""
    s, rows, target = grouped_sizes(node), node.dim("rows"), node.target
    chunk, most, queries = size.tokens, size.warps, queries_of(node, size)
    length = min(node.dim("MP") * s.page, TYPICAL)
    chunks = max(1, (length + chunk // 2) // chunk)
    merges = 3e-6 * ((chunks > 1) + (chunks > FAN))
    shape = _shape(s, target, most, queries)
    runs = -(-s.tile // queries)
    latency = 9e-6 + 2.3e-6 * length / (16 * chunks * shape.readers)
    read = 2 * runs * rows * length * s.kv_heads * token_bytes(s) / (0.9 * target.bandwidth)
    shared = shape.shared + _listed(s, node, queries)
    blocks = _resident(target, most, shape.readers * queries, queries, shared)
    rounds = runs * rows * s.kv_heads * chunks / (target.sms * blocks)
    return max(latency, read + 6.5e-6 * max(1.0, rounds)) + merges


def _candidate(size: Chunks) -> Candidate:
    def planned(node: Node) -> Plan:
        return (one_token.plan_decode if sizes(node).tile == 1 else plan)(node, size)

    def predicted(node: Node) -> float:
        return (one_token.cost_decode if sizes(node).tile == 1 else cost)(node, size)

    return Candidate(
        size.name,
        "attention/attention_decode_mma.cu",
        planned,
        predicted,
        partial(refuse, size=size),
        why=size.why,
        form=size.form,
    )


SIZES = (*sm_90a.DECODE, *sm_121a.DECODE)
FUSED = tuple(map(_candidate, SIZES))
UNFUSED = tuple(_candidate(replace(size, why=WHY)) for size in SIZES if size.fallback)
