"""The tactic `each` of `grouped_moe` (experts_each_mma.cu): pairs of up to four tokens."""

from spark_engine.kernel import Plan
from spark_engine.plugins.formats.weight_packing import padded
from spark_engine.plugins.kernels.moe.experts.experts_problem import (
    MOST_SLABS,
    THREADS,
    WARPS,
    Problem,
    by_parts,
    macros,
    part_slabs,
    refuse,
    split,
    weights,
)
from spark_engine.plugins.launch import Candidate, Kernel, Node

MOST_TOKENS = 4
MOST_TURNS = 22  # k-slabs of `each_down` that a warp holds


def refuse_each(node: Node) -> str | None:
    """Refuses more than a few tokens."""
    if reason := refuse(node):
        return reason
    p = Problem.of(node)
    if p.tokens > MOST_TOKENS or not p.four_bits or p.quant:
        return f"{p.tokens} tokens of format {p.kind}; up to {MOST_TOKENS} of W4A16 are served"
    turns = -(-p.chosen // (WARPS // split(p.inner))) * part_slabs(p.inner)
    if turns > MOST_TURNS or part_slabs(p.hidden) > MOST_SLABS:
        return f"{p.chosen} experts a token of {p.hidden} x {p.inner} do not fit in registers"
    return None


def plan_each(node: Node) -> Plan:
    """each_up, each_down."""
    p = Problem.of(node)
    node, sizes = node.with_scratch(h=p.pairs * p.inner * 2), macros(p)
    steps = -(-(padded(p.inner, 32) // 32) // (WARPS // split(p.hidden)))
    up = Kernel("each_up", f"x ids {weights(p, 'w13')} h")
    down = Kernel("each_down", f"h ids weights {weights(p, 'w2')} y")
    return node.plan(
        up.launch(node, (2 * steps, p.pairs), THREADS, sizes),
        down.launch(node, (-(-p.hidden // 16), p.tokens), THREADS, sizes),
    )


def cost_each(node: Node) -> float:
    """Every pair's expert, read again where it is shared, and two launches."""
    p = Problem.of(node)
    return 1.15 * p.pairs * p.expert_bytes / node.target.bandwidth + 4e-6


EACH = Candidate("each", "moe/experts/experts_each_mma.cu",
                 plan_each, cost_each, refuse_each, by_parts)  # fmt: skip
