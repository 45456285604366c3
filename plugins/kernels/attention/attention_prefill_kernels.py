"""Planner of `paged_attention`: prefill in two launches, and the tactics of unfused decode."""

from functools import partial

from spark_engine.kernel import DECLARED, Launch, Plan, Scratch
from spark_engine.plugins.kernels.attention.attention_decode_kernels import (
    PAGES,
    pages_macros,
    refuse_pages,
    rope_macros,
    sizes,
)
from spark_engine.plugins.kernels.attention.attention_round_kernels import UNFUSED
from spark_engine.plugins.launch import Candidate, Kernel, Node
from spark_engine.tensors import DType

APPEND = Kernel(
    "paged_append",
    f"qkv q_norm k_norm inv_freq rope_offsets kv_scale {PAGES} queries longest",
    source="attention/attention_prefill_mma.cu",
)
_ATTEND = f"queries kv_scale {PAGES} y"
PREFILL = Kernel("paged_prefill", f"{_ATTEND} longest")
_PAIRS = "attention/attention_prefill_wgmma_sm90.cu"
_PAIR = "attention/attention_prefill_pair_mma.cu"
PAIRS = Kernel("paged_pairs", f"{_ATTEND} sums? stats? counters? longest", source=_PAIRS)
PREFILL_PAIR = Kernel("paged_prefill_pair", f"{_ATTEND} longest", source=_PAIR)
TILE = 64  # tokens of a prefill row
PAIR = 2  # heads of a block of `paged_pairs`
PAIR_DIM, PAIR_KEYS = 256, 64  # of `paged_pairs`: dimensions of a head, tokens of a tile of keys
# Of `paged_pairs`, by whether pages hold codes: pieces of a query in registers; registers of a
# thread of a consumer and of the producer. Two consumers and the producer have 504 in sum.
HELD = {True: (0, 208, 88), False: (6, 232, 40)}
SPLITS = (16, 8, 4, 2)  # blocks that share a tile's keys


def refuse_prefill(node: Node) -> str | None:
    """Why no prefill kernel takes the node, or None."""
    if (tile := sizes(node).tile) != TILE:
        return f"rows are of {tile} tokens, not {TILE}"
    return refuse_pages(node)


def refuse_pairs(node: Node) -> str | None:
    """Why `paged_pairs` does not take the node, or None."""
    if not node.target.wgmma:
        return f"{node.target.name} has no warpgroup matrix instructions"
    return refuse_group_of_two(node)


def refuse_tiles_pair(node: Node) -> str | None:
    """Why `paged_prefill_pair` does not take the node, or None; targets with wgmma have
    `paged_pairs`."""
    if node.target.wgmma:
        return f"{node.target.name} has warpgroup matrix instructions"
    return refuse_group_of_two(node)


def refuse_group_of_two(node: Node) -> str | None:
    """Why no kernel with two heads a block takes the node, or None."""
    s = sizes(node)
    if s.dim != PAIR_DIM:
        return f"heads of {s.dim} are not of {PAIR_DIM}"
    if s.group % PAIR:
        return f"{s.group} heads share a kv head, not a multiple of {PAIR}"
    if s.page % PAIR_KEYS:
        return f"pages of {s.page} tokens do not hold tiles of {PAIR_KEYS}"
    return refuse_prefill(node)


def splits_of(node: Node) -> int:
    """The most parts of a tile's keys that fit in one wave of blocks; 1: rows fill the wave."""
    blocks = node.dim("rows") * sizes(node).heads // PAIR
    return next((n for n in SPLITS if blocks * n <= node.target.sms), 1)


def refuse_split(node: Node) -> str | None:
    """Why `paged_pairs` does not split the node's keys, or None."""
    s, rows, sms = sizes(node), node.dim("rows"), node.target.sms
    reason = refuse_pairs(node)
    if reason is None and splits_of(node) == 1:
        return f"{rows} rows of {s.heads} heads fill {sms} multiprocessors without splits"
    return reason


def _order(node: Node) -> str:
    """The reduction key: a token's bits depend on the parts and on the end of its tile."""
    return f"{splits_of(node)} parts"


def plan_prefill(node: Node) -> Plan:
    """`paged_append` over tokens, then `paged_prefill` over rows and heads."""
    s, node = sizes(node), with_queries(node)
    grid, macros = (node.dim("rows"), s.heads), tiles_macros(node)
    attend = PREFILL.launch(node, grid, 128, macros, DECLARED, longest=node.dim("MP"))
    return node.plan(appended(node), attend)


def plan_pairs(node: Node, split: bool) -> Plan:
    """`paged_append`, then `paged_pairs` over rows, pairs of heads and parts of the keys."""
    s, rows, splits = sizes(node), node.dim("rows"), splits_of(node) if split else 1
    node = with_queries(node)
    held, most, rest = HELD[s.storage is DType.U8]
    numbers = {
        "SPLITS": splits,
        "HELD": held,
        "CONSUMER_REGISTERS": most,
        "PRODUCER_REGISTERS": rest,
    }
    if splits > 1:
        parts = rows * s.heads * splits
        counters = Scratch(rows * s.heads * 4, zeroed=True)
        sums, stats = parts * TILE * s.dim * 4, parts * 128 * 16
        node = node.with_scratch(sums=sums, stats=stats, counters=counters)
    attend = PAIRS.launch(
        node,
        (rows, s.heads // PAIR, splits),
        128 * (PAIR + 1),
        {**pages_macros(node, s.heads), **numbers},
        DECLARED,
        longest=node.dim("MP"),
    )
    return node.plan(appended(node), attend)


def plan_tiles_pair(node: Node) -> Plan:
    """`paged_append`, then `paged_prefill_pair` over pairs of heads and rows."""
    s, node = sizes(node), with_queries(node)
    attend = PREFILL_PAIR.launch(
        node,
        (s.heads // PAIR, node.dim("rows")),
        256,
        pages_macros(node, s.heads),
        DECLARED,
        longest=node.dim("MP"),
    )
    return node.plan(appended(node), attend)


def tiles_macros(node: Node) -> dict[str, int | float]:
    """The macros of attention_prefill_mma.cu."""
    macros = pages_macros(node, sizes(node).heads)
    return {**macros, **rope_macros(node), "SHARED_LIMIT": node.target.shared_bytes}


def with_queries(node: Node) -> Node:
    """The node with scratch memory for the queries that `paged_append` writes."""
    s = sizes(node)
    return node.with_scratch(queries=node.dim("rows") * TILE * s.heads * s.dim * 2)


def appended(node: Node) -> Launch:
    """`paged_append` over tokens."""
    grid, macros = node.dim("rows") * TILE, tiles_macros(node)
    return APPEND.launch(node, grid, 256, macros, longest=node.dim("MP"))


def cost_prefill(node: Node, share: float, heads: int, resident: int, splits: int) -> float:
    """Seconds: the products of half of the longest context at `share` of a library's rate, by the
    waves of blocks of `heads` heads; then a launch, and the merge of splits."""
    s, rows, target = sizes(node), node.dim("rows"), node.target
    pairs = rows * TILE * (node.dim("MP") * s.page / 2)
    blocks, capacity = rows * s.heads // heads * splits, target.sms * resident
    rate = target.bf16_flops * share * blocks / (-(-blocks // capacity) * capacity)
    return 4 * pairs * s.heads * s.dim / rate + (12e-6 if splits > 1 else 8e-6)


def _cost_pairs(node: Node, split: bool) -> float:
    return cost_prefill(node, 0.8, PAIR, 1, splits_of(node) if split else 1)


TILES = Candidate(
    "tiles", "attention/attention_prefill_mma.cu", plan_prefill,
    partial(cost_prefill, share=1 / 3, heads=1, resident=2, splits=1), refuse_prefill,
    why="heads of fewer than 256 dimensions, odd groups and pages of fewer than 64 tokens",
)  # fmt: skip
TILES_PAIR = Candidate(
    "tiles_pair", _PAIR, plan_tiles_pair,
    partial(cost_prefill, share=0.51, heads=PAIR, resident=1, splits=1), refuse_tiles_pair,
    why="0.65 of the time of tiles: benchmarks/log/attention/attention_prefill_pair_mma.md",
)  # fmt: skip
PAIRS_WHOLE = Candidate(
    "pairs", _PAIRS, partial(plan_pairs, split=False), partial(_cost_pairs, split=False),
    refuse_pairs,
    why="half of the time of tiles: benchmarks/log/attention/attention_prefill_wgmma_sm90.md",
)  # fmt: skip
PAIRS_SPLIT = Candidate(
    "pairs_split", _PAIRS, partial(plan_pairs, split=True), partial(_cost_pairs, split=True),
    refuse_split, _order, why="few tokens of a prompt behind many: benchmarks/log/runtime.md",
)  # fmt: skip
CANDIDATES = (*UNFUSED, TILES, TILES_PAIR, PAIRS_WHOLE, PAIRS_SPLIT)
