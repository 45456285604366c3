"""The CUDA side of attention over a round of drafts: rows of two to eight tokens.

One launch, as for one token (`attention_decode_kernels.py`), and for each order of one token's sums
a tactic with the same: a key of `reduction` is the name of the tactic of tile 1 that gives a token
the same bits. Sizes here mirror `struct Block` of paged_merge.cuh and what a team has behind its
ring (paged_team.cuh).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from spark_engine.kernel import Plan, Target
from spark_engine.plugins.kernels.attention.attention_decode_kernels import (
    ARGS,
    COLUMNS,
    DECODE,
    RESIDENT,
    ROW,
    TYPICAL,
    UNFUSED,
    epilogue,
    most_warps,
    pages_macros,
    refuse_group,
    sizes,
    stages_alone,
    token_bytes,
    walkers_of,
    with_sums,
)
from spark_engine.plugins.launch import Candidate, Kernel, Node
from spark_engine.plugins.state.paged_kv import ROUND, Sizes
from spark_engine.plugins.tuning import sm_90a, sm_121a
from spark_engine.plugins.tuning.sizes import FAN, Shared

ROUNDED = Kernel("paged_round", ARGS)
LISTED = 11 << 10  # bytes that a block keeps free for its list of runs
DEEP = {1: (), 2: (4, 3), 4: (6, 4, 3)}  # tiles of a team's ring, where there is room
LEAST = 128  # dimensions of a head that a team takes
WEIGHTS = 512  # bytes of a team for each query, twice where values lag


def runs_of(tile: int, queries: int) -> int:
    """Runs of a row, at most: queries of one size of chunks, which changes twice at most; and those
    that are not there."""
    return min(tile, -(-tile // queries) + 3)


def refuse(node: Node, size: Shared) -> str | None:
    """Refuses other tiles, queries without a gain, more warps or shared memory than there are."""
    s, target, most, queries = sizes(node), node.target, size.chunks.warps, size.queries
    if not 2 <= s.tile <= ROUND:
        return f"rows are of {s.tile} tokens, not of 2 to {ROUND}"
    if queries > 1 and -(-s.tile // queries) == -(-s.tile // (queries // 2)):
        return f"{s.tile} queries by {queries} read no less than by {queries // 2}"
    if queries > 1 and s.dim < LEAST:
        return f"heads of {s.dim} are too small to share out; from {LEAST} on"
    warps = walkers_of(s, most) * queries
    if queries > 1 and warps > most_warps(s, target):
        return f"{warps} warps have too few registers each"
    reason = refuse_group(node, size.chunks)
    shared = _shape(s, target, most, queries).shared + _listed(s, node, queries)
    if reason is None and shared > target.shared_bytes:
        return f"{warps} warps take {shared} bytes of shared memory; {target.name} has less"
    return reason


def _listed(s: Sizes, node: Node, queries: int) -> int:
    """Bytes of the list of runs."""
    return ROW * node.dim("rows") * runs_of(s.tile, queries)


@dataclass(frozen=True)
class Shape:
    """A block: rings, tiles of each, queries merged at once, bytes without the list of runs."""

    walkers: int
    stages: int
    at_once: int
    shared: int


def _shape(s: Sizes, target: Target, most: int, queries: int) -> Shape:
    """A team's ring is deeper, and all sums of a block lie side by side, where there is room beside
    the other blocks of a multiprocessor."""
    token, walkers = token_bytes(s), walkers_of(s, most)

    def made(stages: int, at_once: int) -> Shape:
        weights = WEIGHTS * queries * (1 + (stages > 2)) if queries > 1 else 0
        arena = max(stages * 2 * 16 * token + weights, at_once * COLUMNS * (s.dim + 4) * 4)
        heads = queries * COLUMNS * (s.dim + 8) * 2
        rest = heads + 2 * s.tile * token + at_once * walkers * COLUMNS * 8
        return Shape(walkers, stages, at_once, walkers * arena + rest + 80)

    alone = stages_alone(s)
    blocks = max(1, RESIDENT // (walkers * queries))
    room = (target.shared_bytes + 1024) // blocks - 1024 - LISTED
    deep = DEEP[queries] if target.large_shared else ()
    forms = [made(stages, queries) for stages in (*deep, alone)]
    return next((f for f in forms if f.shared <= room), made(alone, 1))


def plan(node: Node, size: Shared) -> Plan:
    """As many blocks as are resident; partial sums of every chunk of every query."""
    s, rows, target = sizes(node), node.dim("rows"), node.target
    chunks, queries = size.chunks, size.queries
    shape = _shape(s, target, chunks.warps, queries)
    walkers, shared = shape.walkers, shape.shared
    listed, runs = _listed(s, node, queries), runs_of(s.tile, queries)
    blocks = _resident(target, chunks.warps, walkers * queries, queries, shared + listed)
    places = min(chunks.most, -(-node.dim("MP") * s.page // chunks.tokens))
    items = rows * runs * s.kv_heads * places
    macros = {
        **pages_macros(node, s.heads),
        "TOKENS": s.tile,
        "QUERIES": queries,
        "WALKERS": walkers,
        "WARPS": walkers * queries,
        "STAGES": shape.stages,
        "AT_ONCE": shape.at_once,
        "CHUNK": chunks.tokens,
        "MOST_CHUNKS": chunks.most,
        "BLOCKS": blocks,
        "SHARED": shared,
        **epilogue(node),
    }
    sums = rows * s.tile * s.kv_heads * places * s.group
    node = with_sums(node, sums, rows * runs * s.kv_heads)
    launch = ROUNDED.launch(
        node, min(items, target.sms * blocks), 32 * walkers * queries, macros, shared + listed,
        rows=rows, longest=node.dim("MP"),
    )  # fmt: skip
    return node.plan(launch)


def _resident(target: Target, most: int, warps: int, queries: int, shared: int) -> int:
    """Blocks of a multiprocessor; one takes 1 KiB beside what it asks for."""
    by_warps = RESIDENT // (most if queries == 1 else warps)
    return max(1, min(by_warps, (target.shared_bytes + 1024) // (shared + 1024)))


def cost(node: Node, size: Shared) -> float:
    """As of one token, with every run reading its row once more."""
    s, rows, target = sizes(node), node.dim("rows"), node.target
    chunk, most, queries = size.chunks.tokens, size.chunks.warps, size.queries
    length = min(node.dim("MP") * s.page, TYPICAL)
    chunks = max(1, (length + chunk // 2) // chunk)
    merges = 3e-6 * ((chunks > 1) + (chunks > FAN))
    shape = _shape(s, target, most, queries)
    runs = -(-s.tile // queries)
    way = 9e-6 + 2.3e-6 * length / (16 * chunks * shape.walkers)
    read = 2 * runs * rows * length * s.kv_heads * token_bytes(s) / (0.9 * target.bandwidth)
    shared = shape.shared + _listed(s, node, queries)
    blocks = _resident(target, most, shape.walkers * queries, queries, shared)
    rounds = runs * rows * s.kv_heads * chunks / (target.sms * blocks)
    return max(way, read + 6.5e-6 * max(1.0, rounds)) + merges


def _candidate(size: Shared) -> Candidate:
    return Candidate(
        size.name,
        "attention/attention_round_mma.cu",
        partial(plan, size=size),
        partial(cost, size=size),
        partial(refuse, size=size),
        lambda node: size.chunks.name,
        size.why,
        size.form,
    )


ROUNDS = (*sm_90a.ROUNDS, *sm_121a.ROUNDS)
FUSED = (*DECODE, *map(_candidate, ROUNDS))
UNFUSED_ROUNDS = tuple(_candidate(replace(size, why=UNFUSED)) for size in ROUNDS if size.fallback)
