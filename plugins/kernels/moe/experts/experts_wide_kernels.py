"""The tactics `tiles` and `tiles_128` of `grouped_moe` on wgmma (experts_wide_wgmma_sm90.cu).

`tiles` cuts tiles of 64 tokens and adds a dot product in the parts that the other tactics have: it
has their bits. `tiles_128` cuts tiles of 128, which halves the weights that are dequantised, and so
has registers for one sum alone: k ascending. An expert's output then passes through bf16.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from spark_engine.kernel import DECLARED, Launch, Plan
from spark_engine.plugins.formats import expert_layout as et
from spark_engine.plugins.kernels.moe.experts.experts_problem import (
    Problem,
    combine,
    macros,
    refuse,
    weights,
)
from spark_engine.plugins.launch import Candidate, Kernel, Node

SORT = Kernel("moe_sort", "x ids x_slabs ranks order tiles tokens")
SORT_CLUSTER = 8  # blocks that sort
FEWEST = 512  # tokens below which no expert fills a tile of 128


@dataclass(frozen=True)
class Tiling:
    """Tokens of a tile, and what else sets a tactic's kernels apart.

    Attributes:
        block_m: tokens of a tile.
        part_bytes: of a column of an expert's output.
        tuning: macros in addition to those of every tactic.
    """

    block_m: int
    part_bytes: int
    tuning: Mapping[str, int]


BY_PARTS = Tiling(64, 4, {})
ASCENDING = Tiling(128, 2, {"UP_WK": 1, "DOWN_WK": 1, "PARTS_BF16": 1})


def refuse_wide_128(node: Node) -> str | None:
    """Refuses few tokens too."""
    reason, tokens = refuse(node), node.dim("tokens")
    if reason is None and tokens < FEWEST:
        return f"{tokens} tokens; tiles of {ASCENDING.block_m} want {FEWEST}"
    return reason


def most_tiles(p: Problem, block_m: int) -> int:
    """Tiles that the worst routing makes."""
    return p.pairs // block_m + min(p.experts, p.pairs)


def plan_wide(node: Node, tiling: Tiling) -> Plan:
    """sort, up, down, combine."""
    p, target = Problem.of(node), node.target
    sizes = macros(
        p, **{"BLOCK_M": tiling.block_m, **tiling.tuning}, SHARED_LIMIT=target.shared_bytes
    )
    wide, inner = (-(-k // et.KSLAB) for k in (p.hidden, p.inner))
    most = most_tiles(p, tiling.block_m)
    node = node.with_scratch(
        x_slabs=p.tokens * wide * 128,
        order=p.pairs * 4,
        tiles=(1 + most) * 16,
        h=p.pairs * inner * 128,
        parts=p.pairs * p.hidden * tiling.part_bytes,
        ranks=p.pairs * 4,
    )
    rest = -(-p.tokens * wide * 2 // 1024)  # blocks that could reorder x
    clusters = max(2, min(target.sms, SORT_CLUSTER + rest) // SORT_CLUSTER)
    blocks = clusters * SORT_CLUSTER
    sort = SORT.launch(node, blocks, 1024, sizes, cluster=SORT_CLUSTER, tokens=p.tokens)

    def product(symbol: str, rows: str, weight: str, out: str, panels: int) -> Launch:
        kernel = Kernel(symbol, f"{rows} order tiles {weights(p, weight)} {out}")
        grid = min(target.sms, most * -(-panels // 4))
        return kernel.launch(node, grid, 640, sizes, DECLARED)

    return node.plan(
        sort,
        product("wide_up", "x_slabs", "w13", "h", -(-p.inner // 32)),
        product("wide_down", "h", "w2", "parts", -(-p.hidden // 64)),
        combine(node, p, sizes),
    )


def cost_wide(node: Node, tiling: Tiling) -> float:
    """Bytes and mathematics; rows written and added; four launches. Fitted to measurements."""
    p, target = Problem.of(node), node.target
    read = 1.25 * p.hit * p.expert_bytes / target.bandwidth
    multiply = 1.5 * 6 * p.pairs * p.hidden * p.inner / target.bf16_flops
    rest = 15e-6
    if tiling is ASCENDING:
        multiply, rest = multiply / 1.5, 45e-6
    return read + multiply + tiling.part_bytes * p.pairs * p.hidden / target.bandwidth + rest


def _candidate(name: str, refusal: Callable[[Node], str | None], tiling: Tiling) -> Candidate:
    plan, cost = partial(plan_wide, tiling=tiling), partial(cost_wide, tiling=tiling)
    return Candidate(name, "moe/experts/experts_wide_wgmma_sm90.cu", plan, cost, refusal)


WIDE = _candidate("wide", refuse, BY_PARTS)
WIDE_128 = _candidate("wide_128", refuse_wide_128, ASCENDING)
