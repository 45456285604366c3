"""The tactic `small n` of `linear` (up to 256 weight rows): latency, not bytes. Imports no CUDA."""

from __future__ import annotations

from spark_engine.kernel import (
    Attrs,
    Early,
    Launch,
    Plan,
    Pointer,
    Scalar,
    Specs,
    Tactic,
    Target,
)
from spark_engine.plugins.linear.weight_layout import M16, PANEL
from spark_engine.tensors import DType

SPLITS = 64  # parts of k: 8 blocks of a cluster, 8 warps of each
STEP = 16  # elements of k in a matrix step
MOST_STEPS = 6  # whose weights a lane holds in registers
BLOCK_M = 8  # tokens of a cluster


def _steps(k: int) -> int:
    return -(-k // (SPLITS * STEP))


def refuse(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """Refuses all but bf16, over 256 rows of weights, k that no warp holds, a lack of clusters."""
    if not target.clusters:
        return f"clusters of {target.name} are not relied on"
    for spec in specs:
        if spec.dtype is not DType.BF16:
            return f"{spec.name} is {spec.dtype}; only bf16 is served: cast it when lowering"
    n, k = specs[1].dims[0], specs[0].dims[1]
    if n > PANEL:
        return f"{n} rows of weights; up to {PANEL} are served"
    if k % STEP or k > SPLITS * STEP * MOST_STEPS:
        return f"k = {k}; multiples of {STEP} up to {SPLITS * STEP * MOST_STEPS} are served"
    return None


def plan(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    """One launch of clusters of eight."""
    (m, k), n = specs[0].dims, specs[1].dims[0]
    defines = {"STEPS": _steps(k), "OUT_BF16": int(attrs["dtype"] == "bf16")}
    launch = Launch(
        "linear_small_n",
        (8, -(-n // M16), -(-m // BLOCK_M)),
        (256, 1, 1),
        (
            *(Pointer("input", i) for i in (0, 1)),
            Pointer("output", 0),
            *(Scalar("i32", size) for size in (m, n, k)),
        ),
        cluster=(8, 1, 1),
        defines=tuple((name, str(value)) for name, value in defines.items()),
        pdl=True,
        early=Early(begins=True, lets=True, late=True),
    )
    return Plan((launch,))


def cost(attrs: Attrs, specs: Specs, target: Target) -> float:
    """Its latency, and the rounds of blocks, as measured on an H200."""
    (m, _), n = specs[0].dims, specs[1].dims[0]
    blocks = 8 * -(-n // M16) * -(-m // BLOCK_M)
    return 2.5e-6 + 0.86e-6 * blocks / target.sms


SMALL_N = Tactic("small n", "linear/linear_small_n.cu", refuse, plan, cost)
