"""The CUDA side of `fp8_block_linear`: e4m3 matrix instructions, a sum for each block of k."""

from __future__ import annotations

from spark_engine.kernel import Plan
from spark_engine.plugins.kernels.gemm import m16_gemm as sg
from spark_engine.plugins.launch import Candidate, Node

FORM = sg.Form(
    "fp8_block_linear", "xq x_scale w w_scale", 128, {8: (2, 1), 16: (1, 2), 32: (2, 1), 64: (1, 1)}
)
# An m16 tile's k-slab, bytes [r][g][t][step][half][4], becomes four loads (steps) of lanes 4g + t
# with registers (half, r).
CODES = sg.pack(128, 1, (3, 1, 2, 4, 0, 5), (2, 8, 4, 4, 2, 4))


def refuse(node: Node) -> str | None:
    """Refuses ragged weights."""
    return sg.refuse(*node.shape("N", "K"))


def plan(node: Node) -> Plan:
    """One launch."""
    return sg.plan(node, FORM)


def cost(node: Node) -> float:
    """1.2 times the floor, at half of bf16's rate (products are widened to f16), and a launch."""
    return 1.2 * sg.floor(node, node.target.bf16_flops / 2) + 3e-6


CANDIDATES = (Candidate("m16 tiles", "gemm/linear_fp8_block_mma.cu", plan, cost, refuse),)
PACKS = {"w": CODES}
