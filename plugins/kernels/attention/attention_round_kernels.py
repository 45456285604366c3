"""The tactics of decode attention: rows of one token, and rounds of drafts of two to eight.

Each is one launch. A round's sums have one token's order. A team of warps reads one copy of the
keys for as many queries as it has columns for. Sizes mirror `struct Block` of attention_merge.cuh.
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
TEAMS = (4, 2)  # warps of a team; the first that a block has registers for
MIN_SHARE = 32  # dimensions of the values of a team's warp, at least
MIN_TOKEN = 128  # bytes of a token's key of a team, at least
WHY = "nodes of one token or of a round that no fusion takes, and --no-fuse"
WEIGHTS = 1024  # bytes of a team's weights of a tile that several warps score
REFERENCES = 128  # bytes of a float of each column


def runs_of(tile: int, queries: int) -> int:
    """Entries of a row in the list of runs: the chunk size changes at most twice in a row, and
    queries that the row lacks are a run too."""
    return min(tile, -(-tile // queries) + 3)


def teams_of(s: Sizes, target: Target, most: int) -> list[tuple[int, int]]:
    """Warps of a team and queries of a run, largest first: a lane has a column, which is a head of
    a query."""
    warps = most_warps(target) // readers_of(s, most)
    teams = [n for n in TEAMS if n <= warps and s.dim >= MIN_SHARE * n]
    if s.tile == 1 or token_bytes(s) < MIN_TOKEN or not teams:
        return [(1, 1)]
    return [(n, min(s.tile, COLUMNS * n // s.group)) for n in teams]


def refuse(node: Node, size: Chunks) -> str | None:
    """Why no kernel takes the node, or None."""
    s, target = sizes(node), node.target
    if s.tile > ROUND:
        return f"rows are of {s.tile} tokens, not of 1 to {ROUND}"
    reason, shared = refuse_group(node, size), _shared(node, size)
    if reason is None and shared > target.shared_bytes:
        return f"{size.warps} warps take {shared} bytes of shared memory; {target.name} has less"
    return reason


def _shared(node: Node, size: Chunks) -> int:
    """Bytes of shared memory of a block."""
    s = grouped_sizes(node)
    if s.tile == 1:
        return one_token.shape(s, size.warps)[2] + ROW * node.dim("rows")
    shape = _shape(s, node.target, size.warps, ROW * node.dim("rows"))
    return shape.shared + shape.listed


@dataclass(frozen=True)
class Shape:
    """A block: readers and the warps of each; queries of a run; tiles that a team takes at once;
    steps of a ring; queries of a merge; bytes without the list of runs, and those of the list."""

    readers: int
    team: int
    queries: int
    step: int
    stages: int
    merge_batch: int
    shared: int
    listed: int

    @property
    def warps(self) -> int:
        return self.readers * self.team

    def resident(self, target: Target, most: int) -> int:
        """Blocks of a multiprocessor; the hardware reserves 1 KiB a block."""
        by_warps = RESIDENT // (most if self.team == 1 else self.warps)
        return max(
            1, min(by_warps, (target.shared_bytes + 1024) // (self.shared + self.listed + 1024))
        )


def _shape(s: Sizes, target: Target, most: int, row_bytes: int) -> Shape:
    """The form of the largest team that fits, else of the smallest. `row_bytes`: of the list, for
    a run of each row."""
    teams = teams_of(s, target, most)
    forms = [_form(s, target, readers_of(s, most), *team, row_bytes) for team in teams]
    fits = (form for form in forms if form.shared + form.listed <= target.shared_bytes)
    return next(fits, forms[-1])


def _form(s: Sizes, target: Target, readers: int, team: int, queries: int, row_bytes: int) -> Shape:
    """The first form that leaves shared memory for the other blocks of a multiprocessor: large
    steps, deep rings and all queries merged at once; else the smallest."""
    token = token_bytes(s)
    listed = row_bytes * runs_of(s.tile, queries)

    def made(step: int, stages: int, merge_batch: int) -> Shape:
        slot = step * (2 * 16 * token + (WEIGHTS if team > step else 0))
        arena = max(stages * slot, merge_batch * COLUMNS * (s.dim + 4) * 4)
        arena += REFERENCES * (3 * step + 1) if team > 1 else 0
        columns = -(-queries * s.group // (COLUMNS * team // step)) * COLUMNS * team // step
        heads = columns * (s.dim + 8) * 2
        rest = heads + 2 * s.tile * token + merge_batch * readers * COLUMNS * 8
        shared = -(-(readers * arena + rest + 80) // 16) * 16
        return Shape(readers, team, queries, step, stages, merge_batch, shared, listed)

    blocks = max(1, RESIDENT // (readers * team))
    free = (target.shared_bytes + 1024) // blocks - 1024 - listed
    steps = [team >> n for n in range(3) if team >> n]
    rings = (3, 2) if team > 1 else (stages_alone(s),)
    # A lane of 16 warps that share tiles has too few registers to merge several queries at once.
    merges = {n: (1,) if n < team and readers * team > 8 else (queries, 1) for n in steps}
    forms = [made(n, ring, merged) for n in steps for ring in rings for merged in merges[n]]
    return next((form for form in forms if form.shared <= free), forms[-1])


def plan(node: Node, chunks: Chunks) -> Plan:
    """A grid of the resident blocks; scratch memory for the partial sums of every chunk."""
    s, rows, target = grouped_sizes(node), node.dim("rows"), node.target
    shape = _shape(s, target, chunks.warps, ROW * rows)
    blocks, runs = shape.resident(target, chunks.warps), runs_of(s.tile, shape.queries)
    most_chunks = min(chunks.most, -(-node.dim("MP") * s.page // chunks.tokens))
    items = rows * runs * s.kv_heads * most_chunks
    macros = {
        **pages_macros(node, s.heads),
        "TOKENS": s.tile,
        "QUERIES": shape.queries,
        "READERS": shape.readers,
        "TEAM": shape.team,
        "STEP_TILES": shape.step,
        "WARPS": shape.warps,
        "STAGES": shape.stages,
        "MERGE_BATCH": shape.merge_batch,
        "CHUNK": chunks.tokens,
        "MOST_CHUNKS": chunks.most,
        "BLOCKS": blocks,
        "SHARED": shape.shared,
        **epilogue(node),
    }
    sums = rows * s.tile * s.kv_heads * most_chunks * s.group
    node = with_sums(node, sums, rows * runs * s.kv_heads)
    shared = shape.shared + shape.listed
    launch = ROUNDED.launch(
        node, min(items, target.sms * blocks), 32 * shape.warps, macros, shared,
        rows=rows, longest=node.dim("MP"),
    )  # fmt: skip
    return node.plan(launch)


def cost(node: Node, size: Chunks) -> float:
    """Seconds, as of one token; every run reads its row again."""
    s, rows, target = grouped_sizes(node), node.dim("rows"), node.target
    chunk, most = size.tokens, size.warps
    length = min(node.dim("MP") * s.page, TYPICAL)
    chunks = max(1, (length + chunk // 2) // chunk)
    merges = 3e-6 * ((chunks > 1) + (chunks > FAN))
    shape = _shape(s, target, most, ROW * rows)
    runs = -(-s.tile // shape.queries)
    latency = 9e-6 + 2.3e-6 * length / (16 * chunks * shape.readers)
    read = 2 * runs * rows * length * s.kv_heads * token_bytes(s) / (0.9 * target.bandwidth)
    blocks = shape.resident(target, most)
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
