"""The CUDA side of `moe_router`: one launch, the last block of eight tokens chooses for them."""

from __future__ import annotations

from spark_engine.kernel import (
    Attrs,
    Cuda,
    Launch,
    Plan,
    Pointer,
    Scalar,
    Scratch,
    Specs,
    Tactic,
    Target,
)
from spark_engine.tensors import DType

ROWS, TOKENS = 16, 8  # of a block
HELD = 4  # units of 64 k that a warp holds


def refuse(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """Refuses anything but bf16, and rows that do not fit in registers."""
    for spec in specs:
        if spec.dtype is not DType.BF16:
            return f"{spec.name} is {spec.dtype}; only bf16 is served: cast it when lowering"
    hidden, experts = specs[0].dims[1], specs[1].dims[0]
    if hidden % 8 or hidden > 8 * 64 * HELD:
        return f"H = {hidden}; multiples of 8 up to {8 * 64 * HELD} are served"
    if experts > 1024:
        return f"{experts} experts; up to 1024 are served"
    return None


def plan(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    """One launch."""
    (tokens, hidden), experts = specs[0].dims, specs[1].dims[0]
    gated = len(specs) == 3
    sizes = {
        "HIDDEN": hidden,
        "EXPERTS": experts,
        "TOP_K": int(attrs["top_k"]),
        "GATE": int(gated),
    }
    rows, groups = -(-(experts + gated) // ROWS), -(-tokens // TOKENS)
    launch = Launch(
        "moe_router",
        (rows, groups, 1),
        (256, 1, 1),
        (
            *(Pointer("input", i) for i in (0, 1, 2 if gated else 1)),
            *(Pointer("output", i) for i in range(2)),
            *(Pointer("scratch", i) for i in range(2)),
            Scalar("i32", tokens),
        ),
        defines=tuple((name, str(value)) for name, value in sizes.items()),
        overlaps=True,
    )
    logits = Scratch(4 * groups * TOKENS * rows * ROWS)
    return Plan((launch,), (logits, Scratch(4 * groups, zeroed=True)))


def cost(attrs: Attrs, specs: Specs, target: Target) -> float:
    """The weights once from memory, then from cache for every eight tokens; the latency."""
    groups = -(-specs[0].dims[0] // TOKENS)
    return specs[1].nbytes * (1 + 0.3 * (groups - 1)) / target.bandwidth + 4e-6


CUDA = Cuda(tactics=(Tactic("last", "moe_router.cu", refuse, plan, cost),))
