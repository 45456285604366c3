"""The CUDA side of `grouped_moe`: its tactics, by the number of tokens.

`each` (up to 4 tokens), `grouped` (any number; streams each expert once) and `tiles` (many) sum in
one order, so they give the same bits; a prefill's `tiles_128` has another. Tiles are multiplied by
wgmma where the target has it and activations are as they are or e4m3 with scales of their rows,
else by mma.sync, those of W4A4 by FP4 instructions where there are some. How operands are packed is
expert_packs'.
"""

from collections.abc import Callable
from dataclasses import replace

from spark_engine.kernel import Plan
from spark_engine.plugins.kernels.moe.experts import experts_wide_fp8_kernels
from spark_engine.plugins.kernels.moe.experts.experts_each_kernels import EACH
from spark_engine.plugins.kernels.moe.experts.experts_grouped_kernels import GROUPED
from spark_engine.plugins.kernels.moe.experts.experts_problem import Problem
from spark_engine.plugins.kernels.moe.experts.experts_tiles_kernels import (
    TILES,
    TILES_128,
    TILES_FP4,
)
from spark_engine.plugins.kernels.moe.experts.experts_wide_kernels import WIDE, WIDE_128
from spark_engine.plugins.launch import Candidate, Node


def _of_64(node: Node) -> Candidate:
    """The kernels of tiles of 64 tokens."""
    return WIDE if node.target.wgmma and not Problem.of(node).quant else TILES


def _of_128(node: Node) -> Candidate:
    """The kernels of a prefill's tiles."""
    p, target = Problem.of(node), node.target
    if target.wgmma and p.kind in experts_wide_fp8_kernels.FORMATS:
        return experts_wide_fp8_kernels.WIDE_FP8
    if target.wgmma and not p.quant:
        return WIDE_128
    return TILES_FP4 if p.kind == "nvfp4_a4" and target.fp4_mma else TILES_128


def _tiles(one: Candidate, kernels: Callable[[Node], Candidate], why: str = "") -> Candidate:
    """A tactic with the name and order of `one`, and the kernels that suit a node."""

    def plan(node: Node) -> Plan:
        chosen = kernels(node)
        made = chosen.plan(node)
        return replace(made, launches=made.launches_of(chosen.source))

    return replace(
        one,
        plan=plan,
        cost=lambda node: kernels(node).cost(node),
        refuse=lambda node: kernels(node).refuse(node),
        why=why,
    )


CANDIDATES = (
    EACH,
    GROUPED,
    _tiles(TILES, _of_64),
    _tiles(TILES_128, _of_128, "prefill: benchmarks/log/moe/experts_wide_wgmma_sm90.md"),
)
