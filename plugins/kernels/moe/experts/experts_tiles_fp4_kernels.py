"""The tactic `tiles_fp4` of `grouped_moe` (experts_tiles_fp4_sm120.cu): W4A4, many tokens.

Native on sm_121a; on Hopper the instruction is emulated, so that it can be tested there. Few tokens
read weights and little else, whatever the instruction: they stay with `grouped`.
"""

from spark_engine.kernel import DECLARED, Launch, Plan
from spark_engine.plugins.formats import expert_layout as et
from spark_engine.plugins.kernels.gemm.linear_nvfp4_a4_kernels import EMULATED_RATE, FP4_RATE
from spark_engine.plugins.kernels.moe.experts import experts_tiles_kernels as by_tiles
from spark_engine.plugins.kernels.moe.experts import experts_wide_kernels as wide
from spark_engine.plugins.kernels.moe.experts.experts_problem import (
    THREADS,
    Problem,
    combine,
    macros,
    refuse,
    weights,
)
from spark_engine.plugins.launch import Candidate, Kernel, Node

BLOCK_M = wide.ASCENDING.block_m
QUANTISE = Kernel("quantise_rows", "x ids order x_scale codes block_scales")


def refuse_fp4(node: Node) -> str | None:
    """Refuses other formats, and few tokens."""
    if reason := refuse(node):
        return reason
    p = Problem.of(node)
    if p.kind != "nvfp4_a4":
        return f"format {p.kind} has no NVFP4 activations"
    if p.tokens < wide.FEWEST:
        return f"{p.tokens} tokens; tiles of {BLOCK_M} want {wide.FEWEST}"
    return None


def plan_fp4(node: Node) -> Plan:
    """count, sort, quantise, up (which quantises), down, combine."""
    p, target = Problem.of(node), node.target
    most = wide.most_tiles(p, BLOCK_M)
    tuning = {"BLOCK_M": BLOCK_M, "QUANT": p.quant, "SHARED_LIMIT": target.shared_bytes}
    sizes = macros(p, **wide.ASCENDING.tuning, **tuning, **by_tiles.SORT)
    hidden, inner = (-(-k // et.KSLAB) for k in (p.hidden, p.inner))
    node = node.with_scratch(
        **by_tiles.sort_memory(p, BLOCK_M),
        h=p.pairs * inner * 32,
        parts=p.pairs * p.hidden * wide.ASCENDING.part_bytes,
        codes=p.pairs * hidden * 32,
        block_scales=p.pairs * hidden * 4,
        h_block_scales=p.pairs * inner * 4,
    )

    def product(symbol: str, rows: str, weight: str, rest: str, panels: int) -> Launch:
        blocks = min(target.sms, most * -(-panels // 4))
        kernel = Kernel(symbol, f"{rows} order tiles {weights(p, weight)} {rest}")
        return kernel.launch(node, blocks, THREADS, sizes, DECLARED)

    up = "x_scale h_scale h h_block_scales"
    return node.plan(
        *by_tiles.sort(node, p, sizes),
        QUANTISE.launch(node, p.pairs, 256, sizes),
        product("tile_up", "codes block_scales", "w13", up, -(-p.inner // 32)),
        product("tile_down", "h h_block_scales", "w2", "h_scale parts", -(-p.hidden // 64)),
        combine(node, p, sizes),
    )


def cost_fp4(node: Node) -> float:
    """As the other tiles, at the rate of the FP4 instruction or of its emulation. Predicted."""
    p, target = Problem.of(node), node.target
    rate = target.bf16_flops * (0.5 * FP4_RATE if target.fp4_mma else EMULATED_RATE)
    rows = wide.ASCENDING.part_bytes * 2 * p.hidden + 1.2 * (p.hidden + p.inner)
    return by_tiles.seconds(p, target, rate, rows)


TILES_FP4 = Candidate(
    "tiles_fp4",
    "moe/experts/experts_tiles_fp4_sm120.cu",
    plan_fp4,
    cost_fp4,
    refuse_fp4,
    why="prefill of checkpoints that quantise activations to NVFP4 too",
)
