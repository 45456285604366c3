"""The tactic `wide` of `grouped_moe` (moe_wide.cu): many tokens, grouped GEMM by wgmma."""

from __future__ import annotations

from spark_engine.kernel import Arg, Attrs, Launch, Plan, Scalar, Scratch, Specs, Tactic, Target
from spark_engine.plugins.moe import expert_layout as et
from spark_engine.plugins.moe.moe_problem import (
    M16_BYTES,
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

BLOCK_M = 64  # tokens of a tile; the kernels have no other
SORT_CLUSTER = 8  # blocks that sort
STATIC = 5120  # bytes of shared memory that the kernels take beside their ring


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
    return p.pairs // BLOCK_M + min(p.experts, p.pairs)


def plan_wide(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    """sort, up, down, combine."""
    p = problem(attrs, specs)
    parts_of = [-(-k // et.KSLAB) // split(k) for k in (p.hidden, p.inner)]  # k-slabs of a part
    span = 1 if any(n % 2 for n in parts_of) else 2  # k-slabs of a stage
    stage = span * (BLOCK_M * 128 + 16 * M16_BYTES[p.weights])
    depth = min(12, (target.shared_bytes - STATIC) // stage)
    defines = macros(p, BLOCK_M=BLOCK_M, DEPTH=depth)
    x, order, tiles, h, parts, ranks = scratch(0, 1, 2, 3, 4, 5)
    slabs = [-(-k // et.KSLAB) for k in (p.hidden, p.inner)]
    rest = -(-p.tokens * slabs[0] * 2 // 1024)  # blocks that could reorder x
    clusters = max(2, min(target.sms, SORT_CLUSTER + rest) // SORT_CLUSTER)
    sort = Launch("moe_sort", (clusters * SORT_CLUSTER, 1, 1), (1024, 1, 1),
                  (*inputs(0, 1), x, ranks, order, tiles, Scalar("i32", p.tokens)),
                  cluster=(SORT_CLUSTER, 1, 1), defines=defines, pdl=True)  # fmt: skip

    def product(symbol: str, rows: Arg, weight: str, out: Arg, panels: int) -> Launch:
        blocks = min(target.sms, most_tiles(p) * -(-panels // 4))
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
        (1 + most_tiles(p)) * 16,
        p.pairs * slabs[1] * 128,
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


WIDE = Tactic("wide", "moe/moe_wide.cu", refuse_wide, plan_wide, cost_wide)
