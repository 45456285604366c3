"""The tactic `tiles_128` of `grouped_moe` on wgmma with FP8 in blocks or by channel, dynamic scales
(experts_wide_fp8_wgmma_sm90.cu).

e4m3 wgmma over tiles of 64 tokens: registers hold a sum and a block's part of it. In blocks h is
quantised where it is made; by channel its scale needs the whole row, so a launch quantises it.
"""

from spark_engine.kernel import DECLARED, Launch, Plan
from spark_engine.plugins.kernels.moe.experts import experts_wide_kernels as wide
from spark_engine.plugins.kernels.moe.experts.experts_problem import (
    Problem,
    combine,
    macros,
    refuse,
)
from spark_engine.plugins.kernels.moe.experts.experts_tiles_kernels import (
    SORT,
    sort,
    sort_memory,
)
from spark_engine.plugins.launch import Candidate, Kernel, Node

QUANTISE = Kernel("quantise_rows", "x codes scales")
UP = Kernel("wide_up", "codes scales order tiles w13 w13_scale h h_scales")
UP_RAW = Kernel("wide_up", "codes scales order tiles w13 w13_scale raw h_scales")
QUANTISE_INNER = Kernel("quantise_inner", "raw h h_scales")
DOWN = Kernel("wide_down", "h h_scales order tiles w2 w2_scale parts")
SOURCE = "moe/experts/experts_wide_fp8_wgmma_sm90.cu"
FORMATS = ("fp8_block", "fp8_channel")
BLOCK_M = 64


def refuse_fp8(node: Node) -> str | None:
    """Refuses few tokens, and sizes that are no whole blocks of work."""
    if reason := refuse(node):
        return reason
    p = Problem.of(node)
    if p.hidden % 256 or p.inner % 128:
        return f"H = {p.hidden}, I = {p.inner}; multiples of 256 and 128 are served"
    if p.tokens < wide.FEWEST:
        return f"{p.tokens} tokens; {wide.FEWEST} or more are served"
    return None


def plan_fp8(node: Node) -> Plan:
    """count, sort, quantise, up (in blocks it quantises), [quantise], down, combine."""
    p, target = Problem.of(node), node.target
    by_row = p.kind == "fp8_channel"
    scales = (lambda k: 4) if by_row else (lambda k: k // 128 * 4)  # bytes of a row's
    tuning = {"BLOCK_M": BLOCK_M, "SHARED_LIMIT": target.shared_bytes, "QUANT": p.quant, **SORT}
    sizes = macros(p, **tuning, PARTS_BF16=1, UP_WK=1, DOWN_WK=1)
    most = wide.most_tiles(p, BLOCK_M)
    node = node.with_scratch(
        codes=p.tokens * p.hidden,
        scales=p.tokens * scales(p.hidden),
        h=p.pairs * p.inner,
        h_scales=p.pairs * scales(p.inner),
        parts=p.pairs * p.hidden * 2,
        **({"raw": p.pairs * p.inner * 4} if by_row else {}),
        **sort_memory(p, BLOCK_M),
    )

    def product(kernel: Kernel, blocks: int) -> Launch:
        return kernel.launch(node, min(target.sms, most * blocks), 640, sizes, DECLARED)

    up = [product(UP_RAW if by_row else UP, p.inner // 128)]
    if by_row:
        up.append(QUANTISE_INNER.launch(node, p.pairs, 32, sizes))
    return node.plan(
        *sort(node, p, sizes),
        QUANTISE.launch(node, p.tokens, 32, sizes),
        *up,
        product(DOWN, p.hidden // 256),
        combine(node, p, sizes),
    )


def cost_fp8(node: Node) -> float:
    """Bytes and mathematics, half again of a rate of 600 TFLOP/s; rows written and added."""
    p, target = Problem.of(node), node.target
    read = 1.25 * p.hit * p.expert_bytes / target.bandwidth
    multiply = 6 * p.pairs * p.hidden * p.inner / (0.6 * target.bf16_flops)
    rows = p.hidden + (2 * p.inner if p.kind == "fp8_channel" else 0)  # of f32, written, read
    return max(read, multiply) + 4 * p.pairs * rows / target.bandwidth + 30e-6


WIDE_FP8 = Candidate("wide_fp8", SOURCE, plan_fp8, cost_fp8, refuse_fp8)
