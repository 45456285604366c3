"""The CUDA side of `grouped_moe`: tactics for few, for more and for many tokens.

Knows how the kernels of few and of many tokens are cut (moe_grouped_cuda has those between); how
operands are packed is moe_packs'. Knows no model.
"""

from __future__ import annotations

from spark_engine.kernel import (
    Arg,
    Attrs,
    Cuda,
    Launch,
    Plan,
    Pointer,
    Scalar,
    Scratch,
    Specs,
    Tactic,
    Target,
)
from spark_engine.plugins.moe import expert_layout as et
from spark_engine.plugins.moe import moe_packs
from spark_engine.plugins.moe.moe_grouped_cuda import GROUPED
from spark_engine.plugins.moe.moe_problem import (
    STRIP,
    THREADS,
    WARPS,
    Problem,
    combine,
    inputs,
    macros,
    problem,
    refuse,
    scratch,
    split,
    weights,
)

FEW = 4  # tokens that run pair by pair
TILE = 64  # tokens of a tile of the wide kernels, which have no other width
SORT_CLUSTER = 8  # blocks that sort
WIDE_STATIC = 5120  # bytes of shared memory that the wide kernels take beside their ring


def refuse_each(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """Refuses more than a few tokens."""
    reason = refuse(attrs, specs)
    if reason:
        return reason
    p = problem(attrs, specs)
    if p.tokens > FEW or p.kind != "nvfp4":
        return f"{p.tokens} tokens of format {p.kind}; up to {FEW} of nvfp4 are served"
    turns = -(-p.chosen // (WARPS // split(p.inner))) * (-(-p.inner // 64) // split(p.inner))
    if turns > 10:
        return f"{p.chosen} experts a token of {p.inner} do not fit in registers"
    return None


def plan_each(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    """each_up, each_down."""
    p = problem(attrs, specs)
    defines = macros(p)
    groups = et.padded(p.inner, 32) // 32
    steps = -(-groups // (WARPS // split(p.hidden)))
    up = Launch("each_up", (2 * steps, p.pairs, 1), (THREADS, 1, 1),
                (*inputs(0, 1), *weights(p, "w13"), *scratch(0)), defines=defines,
                pdl=True)  # fmt: skip
    down = Launch("each_down", (-(-p.hidden // 16), p.tokens, 1), (THREADS, 1, 1),
                  (*scratch(0), *inputs(1, 2), *weights(p, "w2"), Pointer("output", 0)),
                  defines=defines, pdl=True)  # fmt: skip
    return Plan((up, down), (Scratch(p.pairs * p.inner * 2),))


def cost_each(attrs: Attrs, specs: Specs, target: Target) -> float:
    """Every pair's expert, read again where it is shared, and two launches."""
    p = problem(attrs, specs)
    return 1.15 * p.pairs * p.expert_bytes / target.bandwidth + 4e-6


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


def most_tiles(p: Problem) -> int:
    """Tiles that the worst routing makes."""
    return p.pairs // TILE + min(p.experts, p.pairs)


def plan_wide(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    """sort, up, down, combine."""
    p = problem(attrs, specs)
    parts_of = [-(-k // et.UNIT) // split(k) for k in (p.hidden, p.inner)]  # units of a part
    span = 1 if any(n % 2 for n in parts_of) else 2  # units of a stage
    stage = span * (TILE * 128 + 16 * STRIP[p.weights])
    depth = min(12, (target.shared_bytes - WIDE_STATIC) // stage)
    defines = macros(p, TILE=TILE, DEPTH=depth)
    x, order, tiles, h, parts, ranks = scratch(0, 1, 2, 3, 4, 5)
    units = [-(-k // et.UNIT) for k in (p.hidden, p.inner)]
    rest = -(-p.tokens * units[0] * 2 // 1024)  # blocks that could reorder x
    clusters = max(2, min(target.sms, SORT_CLUSTER + rest) // SORT_CLUSTER)
    sort = Launch("moe_sort", (clusters * SORT_CLUSTER, 1, 1), (1024, 1, 1),
                  (*inputs(0, 1), x, ranks, order, tiles, Scalar("i32", p.tokens)),
                  cluster=(SORT_CLUSTER, 1, 1), defines=defines, pdl=True)  # fmt: skip

    def product(symbol: str, rows: Arg, weight: str, out: Arg, groups: int) -> Launch:
        blocks = min(target.sms, most_tiles(p) * -(-groups // 4))
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
        p.tokens * units[0] * 128,
        p.pairs * 4,
        (1 + most_tiles(p)) * 16,
        p.pairs * units[1] * 128,
        p.pairs * p.hidden * 4,
        p.pairs * 4,
    )
    return Plan(launches, tuple(Scratch(n) for n in sizes))


def cost_wide(attrs: Attrs, specs: Specs, target: Target) -> float:
    """Bytes and mathematics; rows written and added; four launches. Fitted to measurements."""
    p = problem(attrs, specs)
    read = 1.25 * p.hit * p.expert_bytes / target.bandwidth
    multiply = 1.5 * 6 * p.pairs * p.hidden * p.inner / target.bf16_flops
    return read + multiply + 4 * p.pairs * p.hidden / target.bandwidth + 15e-6


CUDA = Cuda(
    tactics=(
        Tactic("each", "moe/moe_each.cu", refuse_each, plan_each, cost_each),
        GROUPED,
        Tactic("wide", "moe/moe_wide.cu", refuse_wide, plan_wide, cost_wide),
    ),
    packs=moe_packs.PACKS,
)
