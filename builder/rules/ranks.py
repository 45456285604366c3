"""The rule that fuses an all-reduce with the norm after it.

Knows the ops all_reduce, norm_quant and reduce_norm_quant of docs/graph.md. Runs after residual
additions and quantisers are fused into the norm. For executors with ranks that exchange data within
a launch.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from spark_engine.builder.graph.edit import add_node, detach
from spark_engine.builder.graph.nodes import is_op, producer, read_alone
from spark_engine.builder.graph.rewrite import Match, RewriteContext, Rule


def find_norm(context: RewriteContext, node: gs.Node) -> Match | None:
    """norm_quant(x, weight, residual, …) that adds a sum over ranks to something else."""
    if not is_op(node, "norm_quant") or not node.attrs["add"]:
        return None
    for i, other in ((0, 2), (2, 0)):
        total = producer(node.inputs[i])
        if total is not None and is_op(total, "all_reduce"):
            return Match(node, {"total": total, "residual": node.inputs[other]})
    return None


def can_join(context: RewriteContext, match: Match) -> str | None:
    """Refuses ranks that cannot read each other's memory, and a sum with another reader, since it
    is no longer stored."""
    if match.parts["total"].attrs.get("across"):
        return "its ranks are on several hosts"
    return read_alone(context.graph, match.parts["total"].outputs)


def join(context: RewriteContext, match: Match) -> None:
    """reduce_norm_quant(…) -> [y], sum, quantised…; it keeps the norm's name."""
    norm, total, residual = match.root, match.parts["total"], match.parts["residual"]
    inputs = [total.inputs[0], norm.inputs[1], residual, *norm.inputs[3:]]
    outputs = list(norm.outputs)
    attrs = {k: v for k, v in norm.attrs.items() if k != "add"}
    attrs["ranks"] = total.attrs["ranks"]
    for node in (norm, total):
        detach(node)
    joined = add_node(context.ops, norm.name, "reduce_norm_quant", inputs, outputs, **attrs)
    context.graph.nodes.append(joined)


REDUCE_NORM = Rule("reduce_norm", find_norm, can_join, join)
