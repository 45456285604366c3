"""The CUDA side of `moe_norm_quant`: the tactics of `grouped_moe`, with the norm at the end.

A tactic that ends in `moe_combine` gets one launch of moe_norm_fma.cu in its place; one that writes
y itself, or has many tokens, is followed by norm_quant. Every sum keeps the order that it has in
the two ops, so that fused and unfused give the same bits. Knows no other kernel of the experts.
"""

from dataclasses import dataclass

from spark_engine.kernel import Attrs, Early, Launch, Plan
from spark_engine.op import Op
from spark_engine.plugins.kernels.common import row_quant as rq
from spark_engine.plugins.kernels.moe.experts import experts_kernels
from spark_engine.plugins.kernels.rowwise import norm_quant_kernels
from spark_engine.plugins.launch import Candidate, Kernel, Node, behind

COMBINE = "moe_combine"  # the launch that is replaced
ROWS = 2  # of a multiprocessor, up to which one launch is faster than two
(NORM,) = norm_quant_kernels.CANDIDATES
KERNEL = Kernel(
    "moe_norm",
    f"ids weights parts residual norm_weight scales? sum {rq.OUTPUTS}",
    source="moe/moe_norm_fma.cu",
    early=Early(lets=True),
)


def _routed(node: Node) -> Node:
    return node.with_later(routed=node["residual"])


def _joins(node: Node, plan: Plan) -> bool:
    """Whether the experts end in one launch over few tokens, which the norm joins."""
    ends = [launch.symbol == COMBINE for launch in plan.launches]
    return ends[-1] and sum(ends) == 1 and node.dim("tokens") <= ROWS * node.target.sms


def _sum_and_norm(node: Node, combine: Launch) -> Launch:
    """moe_norm in the place of moe_combine."""
    _, _, parts, _ = combine.args
    hidden, chosen = node.shape("H", "k")
    threads, vectors = rq.threads_of(hidden)
    numbers = {"THREADS": threads, "VECS": vectors, "K1": chosen}
    macros = rq.macros(node, hidden, **numbers, EPS=node.real("eps"))
    return KERNEL.launch(node, combine.grid, threads, macros, parts=parts)


@dataclass(frozen=True)
class Followed:
    """A tactic of `grouped_moe`, followed by `norm_quant`."""

    experts: Candidate
    grouped_moe: Op
    norm_quant: Op

    def _experts(self, node: Node) -> Node:
        """That of grouped_moe; its result is `routed`."""
        attrs = {name: node.attrs[name] for name in ("format", "dtype")}
        return node.part(self.grouped_moe, attrs, y="routed")

    def _norm(self, node: Node) -> Node:
        """That of norm_quant over `routed`."""
        own: Attrs = {"add": 1, **{n: node.attrs[n] for n in ("eps", "keep", "quant", "n")}}
        return node.part(self.norm_quant, own, x="routed", weight="norm_weight")

    def refuse(self, node: Node) -> str | None:
        """Why either takes no such node."""
        node = _routed(node)
        return self.experts.refuse(self._experts(node)) or NORM.refuse(self._norm(node))

    def plan(self, node: Node) -> Plan:
        """The launches of the experts, and the norm: joined to the last, or on its own."""
        node = _routed(node)
        plan = self.experts.plan(self._experts(node))
        *launches, last = plan.launches_of(self.experts.source)
        if _joins(node, plan):
            return Plan((*launches, _sum_and_norm(node, last)), plan.scratch)
        norm = NORM.plan(self._norm(node)).launches_of(NORM.source)
        return behind((*launches, last, *norm), plan.scratch, node["residual"].nbytes)

    def cost(self, node: Node) -> float:
        """That of the experts, and what the norm moves; a launch where it is a separate one."""
        node = _routed(node)
        inner = self._experts(node)
        joined = _joins(node, self.experts.plan(inner))
        return self.experts.cost(inner) + NORM.cost(self._norm(node)) - joined * rq.LAUNCH_SECONDS

    def reduction(self, node: Node) -> str | None:
        """That of the experts."""
        inner, order = self._experts(_routed(node)), self.experts.reduction
        return self.experts.name if order is None else order(inner)


def candidates(grouped_moe: Op, norm_quant: Op) -> tuple[Candidate, ...]:
    """By the tactics of the first of these ops."""
    made = (Followed(each, grouped_moe, norm_quant) for each in experts_kernels.CANDIDATES)
    return tuple(
        Candidate(
            m.experts.name,
            m.experts.source,
            m.plan,
            m.cost,
            m.refuse,
            m.reduction,
            m.experts.why,
        )
        for m in made
    )
