"""The tactic `each` of `grouped_moe` (moe_each.cu): up to four tokens, token-expert pairs."""

from __future__ import annotations

from spark_engine.kernel import Attrs, Launch, Plan, Pointer, Scratch, Specs, Tactic, Target
from spark_engine.plugins.common.weight_packing import padded
from spark_engine.plugins.moe.moe_problem import (
    THREADS,
    WARPS,
    by_parts,
    inputs,
    macros,
    problem,
    refuse,
    scratch,
    split,
    weights,
)

MOST_TOKENS = 4


def refuse_each(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """Refuses more than a few tokens."""
    reason = refuse(attrs, specs)
    if reason:
        return reason
    p = problem(attrs, specs)
    if p.tokens > MOST_TOKENS or p.kind != "nvfp4":
        return f"{p.tokens} tokens of format {p.kind}; up to {MOST_TOKENS} of nvfp4 are served"
    turns = -(-p.chosen // (WARPS // split(p.inner))) * (-(-p.inner // 64) // split(p.inner))
    if turns > 10:
        return f"{p.chosen} experts a token of {p.inner} do not fit in registers"
    return None


def plan_each(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    """each_up, each_down."""
    p = problem(attrs, specs)
    defines = macros(p)
    panels = padded(p.inner, 32) // 32
    steps = -(-panels // (WARPS // split(p.hidden)))
    up = Launch("each_up", (2 * steps, p.pairs, 1), (THREADS, 1, 1),
                (*inputs(0, 1), *weights(p, "w13"), *scratch(0)), defines=defines,
                pdl=True)  # fmt: skip
    down = Launch("each_down", (-(-p.hidden // 16), p.tokens, 1), (THREADS, 1, 1),
                  (*scratch(0), *inputs(1, 2), *weights(p, "w2"), Pointer("output", 0)),
                  defines=defines, pdl=True)  # fmt: skip
    return Plan((up, down), (Scratch(p.pairs * p.inner * 2),))


def cost_each(attrs: Attrs, specs: Specs, target: Target) -> float:
    """Every pair's expert, read again where it is shared, and two launches."""
    p = problem(attrs, specs)
    return 1.15 * p.pairs * p.expert_bytes / target.bandwidth + 4e-6


EACH = Tactic("each", "moe/moe_each.cu", refuse_each, plan_each, cost_each, by_parts)
