"""The tactic `tiles_128` of `grouped_moe` on wgmma with dynamic scales: FP8 in blocks or by channel,
NVFP4 with FP8 inputs (experts_wide_fp8_wgmma_sm90.cu).

e4m3 wgmma over tiles of 64 tokens: registers hold a sum and a block's part of it; of NVFP4, over
128, which halves the weights that are decoded. In blocks h is quantised where it is made; else its
scale needs the whole row, so a launch quantises it.
"""

from spark_engine.kernel import DECLARED, Launch, Plan
from spark_engine.plugins.kernels.moe.experts import experts_wide_kernels as wide
from spark_engine.plugins.kernels.moe.experts.experts_problem import (
    Problem,
    combine,
    macros,
    refuse,
    weights,
)
from spark_engine.plugins.kernels.moe.experts.experts_tiles_kernels import (
    SORT,
    sort,
    sort_memory,
)
from spark_engine.plugins.launch import Candidate, Kernel, Node

QUANTISE = Kernel("quantise_rows", "x codes scales")
QUANTISE_INNER = Kernel("quantise_inner", "raw h h_scales")
SOURCE = "moe/experts/experts_wide_fp8_wgmma_sm90.cu"
W4A8 = "nvfp4_a8"
FORMATS = ("fp8_block", "fp8_channel", W4A8)


def refuse_fp8(node: Node) -> str | None:
    """Refuses few tokens, and sizes that are no whole blocks of work."""
    if reason := refuse(node):
        return reason
    p = Problem.of(node)
    if p.hidden % 256 or p.inner % 128:
        return f"H = {p.hidden}, I = {p.inner}; multiples of 256 and 128 are served"
    if p.tokens < wide.FEWEST and p.kind != W4A8:  # which has no other tactic
        return f"{p.tokens} tokens; {wide.FEWEST} or more are served"
    return None


def plan_fp8(node: Node) -> Plan:
    """count, sort, quantise, up (in blocks it quantises), [quantise], down, combine."""
    p, target = Problem.of(node), node.target
    by_row, block_m = p.kind != "fp8_block", 128 if p.kind == W4A8 else 64
    scales = (lambda k: 4) if by_row else (lambda k: k // 128 * 4)  # bytes of a row's
    tuning = {"BLOCK_M": block_m, "SHARED_LIMIT": target.shared_bytes, "QUANT": p.quant, **SORT}
    sizes = macros(p, **tuning, PARTS_BF16=1, UP_WK=1, DOWN_WK=1)
    most = wide.most_tiles(p, block_m)
    node = node.with_scratch(
        codes=p.tokens * p.hidden,
        scales=p.tokens * scales(p.hidden),
        h=p.pairs * p.inner,
        h_scales=p.pairs * scales(p.inner),
        parts=p.pairs * p.hidden * 2,
        **({"raw": p.pairs * p.inner * 2} if by_row else {}),
        **sort_memory(p, block_m),
    )

    def product(symbol: str, rows: str, weight: str, out: str, blocks: int) -> Launch:
        kernel = Kernel(symbol, f"{rows} order tiles {weights(p, weight)} {out}")
        return kernel.launch(node, min(target.sms, most * blocks), 640, sizes, DECLARED)

    made = f"{'raw' if by_row else 'h'} h_scales"
    up = [product("wide_up", "codes scales", "w13", made, p.inner // 128)]
    if by_row:
        up.append(QUANTISE_INNER.launch(node, p.pairs, 32, sizes))
    return node.plan(
        *sort(node, p, sizes),
        QUANTISE.launch(node, p.tokens, 32, sizes),
        *up,
        product("wide_down", "h h_scales", "w2", "parts", p.hidden // 256),
        combine(node, p, sizes),
    )


def cost_fp8(node: Node) -> float:
    """Bytes and mathematics, half again of a rate of 600 TFLOP/s; rows written and added."""
    p, target = Problem.of(node), node.target
    read = 1.25 * p.hit * p.expert_bytes / target.bandwidth
    multiply = 6 * p.pairs * p.hidden * p.inner / (0.6 * target.bf16_flops)
    rows = p.hidden + (p.inner if p.kind != "fp8_block" else 0)  # of bf16, written, read
    return max(read, multiply) + 4 * p.pairs * rows / target.bandwidth + 30e-6


WIDE_FP8 = Candidate("wide_fp8", SOURCE, plan_fp8, cost_fp8, refuse_fp8)
