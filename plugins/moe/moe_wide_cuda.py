"""The tactics `wide` and `wide_128` of `grouped_moe` (moe_wide.cu): many tokens, by wgmma.

`wide` cuts tiles of 64 tokens and adds a dot product in the parts that the other tactics have: it
has their bits. `wide_128` cuts tiles of 128, which halves the weights that are dequantised, and so
has registers for one sum alone: k ascending. An expert's output then passes through bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from spark_engine.kernel import Arg, Attrs, Launch, Plan, Scalar, Scratch, Specs, Tactic, Target
from spark_engine.plugins.moe import expert_layout as et
from spark_engine.plugins.moe.moe_problem import (
    M16_BYTES,
    Problem,
    by_parts,
    combine,
    inputs,
    macros,
    problem,
    refuse,
    scratch,
    weights,
)

SORT_CLUSTER = 8  # blocks that sort
STATIC = 5120  # bytes of shared memory that the kernels take beside their ring
FEWEST = 512  # tokens below which no expert fills a tile of 128
Key: TypeAlias = Callable[[Attrs, Specs, Target], str | None]


@dataclass(frozen=True)
class Tiling:
    """Tokens of a tile, and what else sets a tactic's kernels apart.

    Attributes:
        block_m: tokens of a tile.
        part_bytes: of a column of an expert's output.
        tuning: macros beside those of every tactic.
    """

    block_m: int
    part_bytes: int
    tuning: Mapping[str, int]


BY_PARTS = Tiling(64, 4, {})
ASCENDING = Tiling(128, 2, {"UP_WK": 1, "DOWN_WK": 1, "PARTS_BF16": 1})


def refuse_wide(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """Refuses what has no wgmma, and activations that are quantised."""
    reason = refuse(attrs, specs)
    if reason:
        return reason
    if not target.wgmma:
        return f"{target.name} has no wgmma"
    p = problem(attrs, specs)
    if p.quant:
        return f"format {p.kind} quantises activations; the wide kernels take them as they are"
    return None


def refuse_wide_128(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """Few tokens too."""
    reason = refuse_wide(attrs, specs, target)
    tokens = specs[0].dims[0]
    if reason is None and tokens < FEWEST:
        return f"{tokens} tokens; tiles of {ASCENDING.block_m} want {FEWEST}"
    return reason


def most_tiles(p: Problem, block_m: int) -> int:
    """Tiles that the worst routing makes."""
    return p.pairs // block_m + min(p.experts, p.pairs)


def plan_wide(attrs: Attrs, specs: Specs, target: Target, tiling: Tiling) -> Plan:
    """sort, up, down, combine."""
    p = problem(attrs, specs)
    defines = macros(p, BLOCK_M=tiling.block_m, **tiling.tuning)
    slabs = [-(-k // et.KSLAB) for k in (p.hidden, p.inner)]
    ways = [int(dict(defines)[name]) for name in ("UP_WK", "DOWN_WK")]
    span = 1 if any(n // w % 2 for n, w in zip(slabs, ways, strict=True)) else 2  # of a stage
    stage = span * (tiling.block_m * 128 + 16 * M16_BYTES[p.weights])
    depth = min(12, (target.shared_bytes - STATIC) // stage)
    defines += (("DEPTH", str(depth)),)
    x, order, tiles, h, parts, ranks = scratch(0, 1, 2, 3, 4, 5)
    rest = -(-p.tokens * slabs[0] * 2 // 1024)  # blocks that could reorder x
    clusters = max(2, min(target.sms, SORT_CLUSTER + rest) // SORT_CLUSTER)
    sort = Launch("moe_sort", (clusters * SORT_CLUSTER, 1, 1), (1024, 1, 1),
                  (*inputs(0, 1), x, ranks, order, tiles, Scalar("i32", p.tokens)),
                  cluster=(SORT_CLUSTER, 1, 1), defines=defines, pdl=True)  # fmt: skip
    most = most_tiles(p, tiling.block_m)

    def product(symbol: str, rows: Arg, weight: str, out: Arg, panels: int) -> Launch:
        blocks = min(target.sms, most * -(-panels // 4))
        args = (rows, order, tiles, *weights(p, weight), out)
        return Launch(symbol, (blocks, 1, 1), (640, 1, 1), args, depth * stage, defines=defines,
                      pdl=True)  # fmt: skip

    launches = (
        sort,
        product("wide_up", x, "w13", h, -(-p.inner // 32)),
        product("wide_down", h, "w2", parts, -(-p.hidden // 64)),
        combine(p, 4, defines),
    )
    sizes = (
        p.tokens * slabs[0] * 128,
        p.pairs * 4,
        (1 + most) * 16,
        p.pairs * slabs[1] * 128,
        p.pairs * p.hidden * tiling.part_bytes,
        p.pairs * 4,
    )
    return Plan(launches, tuple(Scratch(n) for n in sizes))


def cost_wide(attrs: Attrs, specs: Specs, target: Target, tiling: Tiling) -> float:
    """Bytes and mathematics; rows written and added; four launches. Fitted to measurements."""
    p = problem(attrs, specs)
    read = 1.25 * p.hit * p.expert_bytes / target.bandwidth
    multiply = 1.5 * 6 * p.pairs * p.hidden * p.inner / target.bf16_flops
    rest = 15e-6
    if tiling is ASCENDING:
        multiply, rest = multiply / 1.5, 45e-6
    return read + multiply + tiling.part_bytes * p.pairs * p.hidden / target.bandwidth + rest


def _tactic(name: str, refusal: Key, tiling: Tiling, key: Key | None = None) -> Tactic:
    plan, cost = partial(plan_wide, tiling=tiling), partial(cost_wide, tiling=tiling)
    return Tactic(name, "moe/moe_wide.cu", refusal, plan, cost, key)


WIDE = _tactic("wide", refuse_wide, BY_PARTS, by_parts)
WIDE_128 = _tactic("wide_128", refuse_wide_128, ASCENDING)
