"""The tactic `tiles_fp4` of `grouped_moe` (moe_tiles_fp4.cu): W4A4, many tokens, FP4 instructions.

Native on sm_121a; on Hopper the instruction is emulated, so that it can be tested there. Few tokens
read weights and little else, whatever the instruction: they stay with `grouped`.
"""

from __future__ import annotations

from spark_engine.kernel import Arg, Attrs, Launch, Plan, Scratch, Specs, Tactic, Target
from spark_engine.plugins.linear.nvfp4_linear_a4_cuda import EMULATED_RATE, FP4_RATE
from spark_engine.plugins.moe import expert_layout as et
from spark_engine.plugins.moe.moe_problem import (
    M16_BYTES,
    THREADS,
    Problem,
    combine,
    inputs,
    macros,
    operand,
    problem,
    refuse,
    scratch,
    weights,
)
from spark_engine.plugins.moe.moe_tiles_cuda import (
    MOST_STAGES,
    RESERVED,
    SORT,
    seconds,
    sort,
    sort_bytes,
)
from spark_engine.plugins.moe.moe_wide_cuda import ASCENDING, FEWEST, most_tiles

BLOCK_M = ASCENDING.block_m
ROW_BYTES = 36  # of a k-slab of one row: codes and block scales


def _slabs(p: Problem) -> tuple[int, int]:
    return -(-p.hidden // et.KSLAB), -(-p.inner // et.KSLAB)


def _stage(p: Problem) -> int:
    """Bytes."""
    span = 1 if any(n % 2 for n in _slabs(p)) else 2
    return span * (BLOCK_M * ROW_BYTES + 16 * M16_BYTES[p.weights]) + BLOCK_M * 4


def _depth(p: Problem, target: Target) -> int:
    return min(MOST_STAGES, (target.shared_bytes - RESERVED) // _stage(p))


def refuse_fp4(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """Refuses other formats, and few tokens."""
    reason = refuse(attrs, specs)
    if reason:
        return reason
    p = problem(attrs, specs)
    if p.kind != "nvfp4_a4":
        return f"format {p.kind} has no NVFP4 activations"
    if p.tokens < FEWEST:
        return f"{p.tokens} tokens; tiles of {BLOCK_M} want {FEWEST}"
    if _depth(p, target) < 2:
        return f"{target.name} has {target.shared_bytes} bytes of shared memory, too few"
    return None


def plan_fp4(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    """count, sort, quantise, up (which quantises), down, combine."""
    p = problem(attrs, specs)
    depth, most = _depth(p, target), most_tiles(p, BLOCK_M)
    tuning = {"BLOCK_M": BLOCK_M, "DEPTH": depth, "QUANT": p.quant, **SORT}
    defines = macros(p, **ASCENDING.tuning, **tuning)
    order, tiles, h, parts, x, x_scales, h_scales = scratch(0, 1, 3, 4, 5, 6, 7)
    given, following = (operand(p, n, n) for n in ("x_scale", "h_scale"))
    args: tuple[Arg, ...] = (*inputs(0, 1), order, given, x, x_scales)
    quantise = Launch("quantise_rows", (p.pairs, 1, 1), (256, 1, 1), args, defines=defines,
                      pdl=True)  # fmt: skip

    def product(symbol: str, rows: tuple[Arg, ...], weight: str, rest: tuple[Arg, ...],
                panels: int) -> Launch:  # fmt: skip
        blocks = min(target.sms, most * -(-panels // 4))
        whole = (*rows, order, tiles, *weights(p, weight), *rest)
        return Launch(symbol, (blocks, 1, 1), (THREADS, 1, 1), whole, depth * _stage(p),
                      defines=defines, pdl=True)  # fmt: skip

    launches = (
        *sort(p, defines),
        quantise,
        product(
            "tile_up", (x, x_scales), "w13", (given, following, h, h_scales), -(-p.inner // 32)
        ),  # fmt: skip
        product("tile_down", (h, h_scales), "w2", (following, parts), -(-p.hidden // 64)),
        combine(p, 4, defines),
    )
    wide, inner = _slabs(p)
    sizes = (
        *sort_bytes(p, BLOCK_M),
        p.pairs * inner * 32,
        p.pairs * p.hidden * ASCENDING.part_bytes,
        p.pairs * wide * 32,
        p.pairs * wide * 4,
        p.pairs * inner * 4,
    )
    return Plan(launches, tuple(Scratch(n) for n in sizes))


def cost_fp4(attrs: Attrs, specs: Specs, target: Target) -> float:
    """As the other tiles, at the rate of the FP4 instruction or of its emulation. Predicted."""
    p = problem(attrs, specs)
    rate = target.bf16_flops * (0.5 * FP4_RATE if target.fp4_mma else EMULATED_RATE)
    return seconds(
        p, target, rate, ASCENDING.part_bytes * 2 * p.hidden + 1.2 * (p.hidden + p.inner)
    )


TILES_FP4 = Tactic("tiles_fp4", "moe/moe_tiles_fp4.cu", refuse_fp4, plan_fp4, cost_fp4)
