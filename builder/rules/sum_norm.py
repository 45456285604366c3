"""The rules that fuse a sum with the norm that adds it: of a layer's experts, or over ranks.

Knows the ops grouped_moe, all_reduce, norm_quant, moe_norm_quant and reduce_norm_quant of
docs/graph.md. Both run after residual additions and quantisers are fused into the norm. In the last
layer, last_rows is between the experts' sum and the norm, so that rule does not apply; the sum over
ranks is for executors with ranks that exchange data within a launch.
"""

from collections.abc import Callable
from typing import Any

import onnx_graphsurgeon as gs

from spark_engine.builder.graph.edit import add_node, detach
from spark_engine.builder.graph.nodes import is_op, producer, read_alone
from spark_engine.builder.graph.rewrite import Match, RewriteContext, Rule


def _sum_of(op: str) -> Callable[[RewriteContext, gs.Node], Match | None]:
    """The pattern: norm_quant(x, weight, residual, …) that adds the result of `op` to a value."""

    def find(context: RewriteContext, node: gs.Node) -> Match | None:
        if not is_op(node, "norm_quant") or not node.attrs["add"]:
            return None
        for i, other in ((0, 2), (2, 0)):
            total = producer(node.inputs[i])
            if total is not None and is_op(total, op):
                return Match(node, {"total": total, "residual": node.inputs[other]})
        return None

    return find


def can_join(context: RewriteContext, match: Match) -> str | None:
    """Refuses ranks that cannot read each other's memory, and a sum with another reader, since the
    launch no longer stores it."""
    if match.parts["total"].attrs.get("across"):
        return "its ranks are on several hosts"
    return read_alone(context.graph, match.parts["total"].outputs)


def join_experts(context: RewriteContext, match: Match) -> None:
    """moe_norm_quant(…) -> [y], sum, quantised…; it keeps the norm's name."""
    norm, experts = match.root, match.parts["total"]
    x, ids, weights, *params = experts.inputs
    operands = [x, ids, weights, match.parts["residual"], norm.inputs[1], *params]
    _join(context, match, "moe_norm_quant", operands, experts.attrs)


def join_ranks(context: RewriteContext, match: Match) -> None:
    """reduce_norm_quant(…) -> [y], sum, quantised…; it keeps the norm's name."""
    total = match.parts["total"]
    operands = [total.inputs[0], match.root.inputs[1], match.parts["residual"]]
    _join(context, match, "reduce_norm_quant", operands, {"ranks": total.attrs["ranks"]})


def _join(
    context: RewriteContext, match: Match, op: str, operands: list[gs.Tensor], own: dict[str, Any]
) -> None:
    norm = match.root
    inputs, outputs = [*operands, *norm.inputs[3:]], list(norm.outputs)
    attrs = {k: v for k, v in norm.attrs.items() if k != "add"} | dict(own)
    for node in (norm, match.parts["total"]):
        detach(node)
    context.graph.nodes.append(add_node(context.ops, norm.name, op, inputs, outputs, **attrs))


MOE_NORM = Rule("moe_norm", _sum_of("grouped_moe"), can_join, join_experts)
REDUCE_NORM = Rule("reduce_norm", _sum_of("all_reduce"), can_join, join_ranks)
