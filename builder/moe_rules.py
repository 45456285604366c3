"""The rule that joins a layer's experts with the norm of the next layer.

Knows the ops grouped_moe, norm_quant and moe_norm_quant of docs/graph.md. Runs after residual
additions and quantisers have moved into the norm. The last layer's sum meets last_rows before a
norm, and stays apart.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from spark_engine.builder.graph import add_node, consumers, detach, is_op, is_output, producer
from spark_engine.builder.rewrite import Place, Rule, Scene


def find_norm(scene: Scene, node: gs.Node) -> Place | None:
    """norm_quant(x, weight, residual, …) that adds what grouped_moe made to something else."""
    if not is_op(node, "norm_quant") or not node.attrs["add"]:
        return None
    for i, other in ((0, 2), (2, 0)):
        experts = producer(node.inputs[i])
        if experts is not None and is_op(experts, "grouped_moe"):
            return Place(node, {"experts": experts, "residual": node.inputs[other]})
    return None


def can_join(scene: Scene, place: Place) -> str | None:
    """Nobody else reads the experts' sum, which the launch would no longer store."""
    y = place.parts["experts"].outputs[0]
    if is_output(scene.graph, y) or len(consumers(y)) > 1:
        return f"{y.name} is also read alone"
    return None


def join(scene: Scene, place: Place) -> None:
    """moe_norm_quant(…) -> [y], sum, quantised…; it keeps the norm's name."""
    norm, experts, residual = place.root, place.parts["experts"], place.parts["residual"]
    x, ids, weights, *params = experts.inputs
    inputs = [x, ids, weights, residual, norm.inputs[1], *params, *norm.inputs[3:]]
    outputs = list(norm.outputs)
    attrs = {k: v for k, v in norm.attrs.items() if k != "add"} | dict(experts.attrs)
    for node in (norm, experts):
        detach(node)
    joined = add_node(scene.ops, norm.name, "moe_norm_quant", inputs, outputs, **attrs)
    scene.graph.nodes.append(joined)


MOE_NORM = Rule("moe_norm", find_norm, can_join, join)
