"""The rule that makes one launch of a decode layer's gated delta net.

Knows the ops causal_conv, gated_delta_step, gated_norm[_quant] and gdn_decode of docs/graph.md.
Runs after the quantisers have moved into the norm.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from spark_engine.builder.graph import add_node, consumers, detach, is_op, is_output, producer
from spark_engine.builder.rewrite import Place, Rule, Scene

ROWS = 3  # last operands of a step: slots, starts, counts


def find_decode(scene: Scene, node: gs.Node) -> Place | None:
    """gated_norm[_quant](gated_delta_step(causal_conv(qkvz), ba), qkvz), a token a row."""
    if not is_op(node, "gated_norm", "gated_norm_quant"):
        return None
    step = producer(node.inputs[0])
    if step is None or not is_op(step, "gated_delta_step"):
        return None
    conv = producer(step.inputs[0])
    if conv is None or not is_op(conv, "causal_conv"):
        return None
    return Place(node, {"step": step, "conv": conv})


def can_fuse(scene: Scene, place: Place) -> str | None:
    """Nobody else reads what the launch would no longer store, and all read the same rows."""
    step, conv = place.parts["step"], place.parts["conv"]
    for node in (conv, step):
        made = node.outputs[0]
        if is_output(scene.graph, made) or len(consumers(made)) > 1:
            return f"{made.name} is also read alone"
    if conv.inputs[0] is not place.root.inputs[1]:
        return f"{conv.name} and {place.root.name} read different projections"
    if any(a is not b for a, b in zip(conv.inputs[-ROWS:], step.inputs[-ROWS:], strict=True)):
        return f"{conv.name} and {step.name} read different rows"
    return None


def fuse_decode(scene: Scene, place: Place) -> None:
    """gdn_decode(…) -> conv_state', gdn_state', [gdn_ring'], [y], quantised…; it keeps the
    norm's name."""
    norm, step, conv = place.root, place.parts["step"], place.parts["conv"]
    qkvz, conv_weight, conv_state, *rows = conv.inputs
    _, *delta = step.inputs[:-ROWS]  # ba, a_log, dt_bias, the states
    _, _, weight, *scales = norm.inputs
    operands = [qkvz, delta[0], conv_weight, conv_state, *delta[1:], weight, *rows]
    outputs = [conv.outputs[1], *step.outputs[1:], *norm.outputs]
    attrs = {"keep": 1, "quant": "none", "n": 1, **norm.attrs}
    attrs |= {n: value for n, value in step.attrs.items() if n != "tile"}
    del attrs["heads"]
    for node in (norm, step, conv):
        detach(node)
    node = add_node(scene.ops, norm.name, "gdn_decode", [*operands, *scales], outputs, **attrs)
    scene.graph.nodes.append(node)


GDN_DECODE = Rule("gdn_decode", find_decode, can_fuse, fuse_decode)
