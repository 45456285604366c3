"""The CUDA side of `fp8_block_linear`: e4m3 matrix instructions, a sum for each block of k."""

from __future__ import annotations

from spark_engine.kernel import Attrs, Cuda, Plan, Specs, Tactic, Target
from spark_engine.plugins.linear import m16_gemm as sg

FORM = sg.Form("fp8_block_linear", 128, {8: (2, 1), 16: (1, 2), 32: (2, 1), 64: (1, 1)})
# An m16 tile's k-slab, bytes [r][g][t][step][half][4], becomes four loads (steps) of lanes 4g + t
# with registers (half, r).
CODES = sg.pack(128, 1, (3, 1, 2, 4, 0, 5), (2, 8, 4, 4, 2, 4))


def _sizes(specs: Specs) -> tuple[int, int, int]:
    return specs[0].dims[0], specs[2].dims[0], specs[0].dims[1]


def refuse(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """Refuses ragged weights."""
    return sg.refuse(*_sizes(specs)[1:])


def plan(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    """One launch."""
    return sg.plan(FORM, *_sizes(specs), 4, str(attrs["dtype"]))


def cost(attrs: Attrs, specs: Specs, target: Target) -> float:
    """1.2 times the floor, at half of bf16's rate (products are widened to f16), and a launch."""
    rate = target.bf16_flops / 2
    return 1.2 * sg.floor(specs, *_sizes(specs), str(attrs["dtype"]), rate, target) + 3e-6


CUDA = Cuda((Tactic("m16 tiles", "linear/fp8_block_linear.cu", refuse, plan, cost),), {2: CODES})
