"""The rule that fuses a layer's experts with the norm of the next layer.

Knows the ops grouped_moe, norm_quant and moe_norm_quant of docs/graph.md. Runs after residual
additions and quantisers are fused into the norm. In the last layer, last_rows is between the sum
and the norm, so the rule does not apply.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from spark_engine.builder.graph.edit import add_node, detach
from spark_engine.builder.graph.nodes import is_op, producer, read_alone
from spark_engine.builder.graph.rewrite import Match, RewriteContext, Rule


def find_norm(context: RewriteContext, node: gs.Node) -> Match | None:
    """norm_quant(x, weight, residual, …) that adds the result of grouped_moe to another value."""
    if not is_op(node, "norm_quant") or not node.attrs["add"]:
        return None
    for i, other in ((0, 2), (2, 0)):
        experts = producer(node.inputs[i])
        if experts is not None and is_op(experts, "grouped_moe"):
            return Match(node, {"experts": experts, "residual": node.inputs[other]})
    return None


def can_join(context: RewriteContext, match: Match) -> str | None:
    """Refuses if another node reads the experts' sum, which the launch no longer stores."""
    return read_alone(context.graph, match.parts["experts"].outputs)


def join(context: RewriteContext, match: Match) -> None:
    """moe_norm_quant(…) -> [y], sum, quantised…; it keeps the norm's name."""
    norm, experts, residual = match.root, match.parts["experts"], match.parts["residual"]
    x, ids, weights, *params = experts.inputs
    inputs = [x, ids, weights, residual, norm.inputs[1], *params, *norm.inputs[3:]]
    outputs = list(norm.outputs)
    attrs = {k: v for k, v in norm.attrs.items() if k != "add"} | dict(experts.attrs)
    for node in (norm, experts):
        detach(node)
    joined = add_node(context.ops, norm.name, "moe_norm_quant", inputs, outputs, **attrs)
    context.graph.nodes.append(joined)


MOE_NORM = Rule("moe_norm", find_norm, can_join, join)
