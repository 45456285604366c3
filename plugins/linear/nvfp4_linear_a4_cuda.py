"""The CUDA side of `nvfp4_linear_a4`: FP4 matrix instructions, emulated where there are none."""

from __future__ import annotations

from spark_engine.kernel import Attrs, Cuda, Plan, Specs, Tactic, Target
from spark_engine.plugins.linear import m16_gemm as sg

FORM = sg.Form("nvfp4_linear_a4", 64, {8: (1, 4), 16: (1, 2), 32: (2, 2), 64: (2, 1)})
FP4_RATE = 3.5  # of bf16's
EMULATED_RATE = 0.01
# An m16 tile's k-slab, bytes [r][g][half of k][t][4], becomes lanes 4g + t, registers (half, r).
CODES = sg.pack(64, 2, (1, 3, 2, 0, 4), (2, 8, 2, 4, 4))
SCALES = sg.pack(64, 16, (1, 0, 2), (2, 8, 4))


def _sizes(specs: Specs) -> tuple[int, int, int]:
    return specs[0].dims[0], specs[4].dims[0], 2 * specs[0].dims[1]


def refuse(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """Refuses ragged weights."""
    return sg.refuse(*_sizes(specs)[1:])


def plan(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    """One launch."""
    return sg.plan(FORM, *_sizes(specs), 5, str(attrs["dtype"]))


def cost(attrs: Attrs, specs: Specs, target: Target) -> float:
    """1.2 times the floor and a launch."""
    rate = target.bf16_flops * (FP4_RATE if target.fp4_mma else EMULATED_RATE)
    return 1.2 * sg.floor(specs, *_sizes(specs), str(attrs["dtype"]), rate, target) + 3e-6


CUDA = Cuda(
    (Tactic("m16 tiles", "linear/nvfp4_linear_a4.cu", refuse, plan, cost),), {2: CODES, 3: SCALES}
)
