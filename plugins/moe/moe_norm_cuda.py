"""The CUDA side of `moe_norm_quant`: the tactics of `grouped_moe`, whose end becomes the norm.

A tactic that ends in `moe_combine` gets one launch of moe_norm.cu in its place; one that writes y
itself, or has many tokens, is followed by norm_quant. Every sum keeps the order that it has in the
two ops, so that fused and unfused give the same bits. Knows no other kernel of the experts.
"""

from __future__ import annotations

from functools import partial

from spark_engine.kernel import Attrs, Launch, Plan
from spark_engine.plugins.common import row_quant_cuda as rq
from spark_engine.plugins.launch import Candidate, Kernel, Node, behind
from spark_engine.plugins.moe import grouped_moe, grouped_moe_cuda
from spark_engine.plugins.rowwise import norm_quant, norm_quant_cuda

COMBINE = "moe_combine"  # the launch that is replaced
ROWS = 2  # of a multiprocessor, up to which one launch is faster than two
(NORM,) = norm_quant_cuda.CANDIDATES
KERNEL = Kernel(
    "moe_norm",
    f"ids weights parts residual norm_weight scales? sum {rq.OUTPUTS}",
    source="moe/moe_norm.cu",
)


def _experts(node: Node) -> Node:
    """That of grouped_moe; its result is `routed`."""
    attrs = {name: node.attrs[name] for name in ("format", "dtype")}
    return node.part(grouped_moe.OP, attrs, y="routed")


def _norm(node: Node) -> Node:
    """That of norm_quant over `routed`."""
    own: Attrs = {"add": 1, **{name: node.attrs[name] for name in ("eps", "keep", "quant", "n")}}
    return node.part(norm_quant.OP, own, x="routed", weight="norm_weight")


def _routed(node: Node) -> Node:
    return node.with_later(routed=node["residual"])


def _refuse(node: Node, experts: Candidate) -> str | None:
    node = _routed(node)
    return experts.refuse(_experts(node)) or NORM.refuse(_norm(node))


def _plan(node: Node, experts: Candidate) -> Plan:
    node = _routed(node)
    plan = experts.plan(_experts(node))
    *launches, last = plan.launches_of(experts.source)
    if _joins(node, plan):
        return Plan((*launches, _sum_and_norm(node, last)), plan.scratch)
    norm = NORM.plan(_norm(node)).launches_of(NORM.source)
    return behind((*launches, last, *norm), plan.scratch, node["residual"].nbytes)


def _joins(node: Node, plan: Plan) -> bool:
    """Whether the experts end in one launch over few tokens, which the norm joins."""
    ends = [launch.symbol == COMBINE for launch in plan.launches]
    return ends[-1] and sum(ends) == 1 and node.dim("tokens") <= ROWS * node.target.sms


def _sum_and_norm(node: Node, combine: Launch) -> Launch:
    """moe_norm in the place of moe_combine."""
    _, _, parts, _ = combine.args
    hidden, chosen = node.shape("H", "k")
    threads, vectors = norm_quant_cuda.threads_of(hidden)
    numbers = {"THREADS": threads, "VECS": vectors, "K1": chosen}
    macros = rq.macros(node, hidden, **numbers, EPS=node.real("eps"))
    return KERNEL.launch(node, combine.grid, threads, macros, parts=parts)


def _cost(node: Node, experts: Candidate) -> float:
    """That of the experts, and what the norm moves; a launch where it is one of its own."""
    node = _routed(node)
    inner = _experts(node)
    joined = _joins(node, experts.plan(inner))
    return experts.cost(inner) + NORM.cost(_norm(node)) - joined * rq.LAUNCH_SECONDS


def _reduction(node: Node, experts: Candidate) -> str | None:
    inner = _experts(_routed(node))
    return experts.name if experts.reduction is None else experts.reduction(inner)


def _candidate(experts: Candidate) -> Candidate:
    refuse, plan = partial(_refuse, experts=experts), partial(_plan, experts=experts)
    cost, key = partial(_cost, experts=experts), partial(_reduction, experts=experts)
    return Candidate(experts.name, experts.source, plan, cost, refuse, key)


CANDIDATES = tuple(map(_candidate, grouped_moe_cuda.CANDIDATES))
