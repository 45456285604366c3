"""The rules that fuse a gated delta net: a decode layer's into one launch, a prefill's convolution
into the launches of the rule.

Knows the ops causal_conv, gated_delta_step, gated_delta_chunk, gated_norm[_quant], gdn_decode and
gdn_prefill of docs/graph.md. Run after the quantisers are fused into the norm.
"""

import onnx_graphsurgeon as gs

from spark_engine.builder.graph.edit import add_node, detach
from spark_engine.builder.graph.nodes import is_op, producer, read_alone
from spark_engine.builder.graph.rewrite import Match, RewriteContext, Rule

ROWS = 3  # last operands of a step: slots, starts, counts
PREFILL_ROWS = 5  # of a prefill: sources and saves too


def find_decode(context: RewriteContext, node: gs.Node) -> Match | None:
    """gated_norm[_quant](gated_delta_step(causal_conv(qkvz), ba), qkvz), a token a row."""
    if not is_op(node, "gated_norm", "gated_norm_quant"):
        return None
    step = producer(node.inputs[0])
    if step is None or not is_op(step, "gated_delta_step"):
        return None
    conv = producer(step.inputs[0])
    if conv is None or not is_op(conv, "causal_conv"):
        return None
    return Match(node, {"step": step, "conv": conv})


def can_fuse(context: RewriteContext, match: Match) -> str | None:
    """Refuses if another node reads a value that the launch no longer stores, or if the nodes read
    different projections or rows."""
    step, conv = match.parts["step"], match.parts["conv"]
    alone = read_alone(context.graph, (conv.outputs[0], step.outputs[0]))
    if alone is not None:
        return alone
    if conv.inputs[0] is not match.root.inputs[1]:
        return f"{conv.name} and {match.root.name} read different projections"
    return _other_rows(conv, step, ROWS)


def _other_rows(conv: gs.Node, rule: gs.Node, count: int) -> str | None:
    """Refuses if the last `count` operands are not the same."""
    if all(a is b for a, b in zip(conv.inputs[-count:], rule.inputs[-count:], strict=True)):
        return None
    return f"{conv.name} and {rule.name} read different rows"


def fuse_decode(context: RewriteContext, match: Match) -> None:
    """gdn_decode(…) -> conv_state', gdn_state', [gdn_ring'], [y], quantised…; it keeps the
    norm's name."""
    norm, step, conv = match.root, match.parts["step"], match.parts["conv"]
    qkvz, conv_weight, conv_state, *rows = conv.inputs
    _, *delta = step.inputs[:-ROWS]  # ba, a_log, dt_bias, the states
    _, _, weight, *scales = norm.inputs
    operands = [qkvz, delta[0], conv_weight, conv_state, *delta[1:], weight, *rows]
    outputs = [conv.outputs[1], *step.outputs[1:], *norm.outputs]
    attrs = {"keep": 1, "quant": "none", "n": 1, **norm.attrs}
    known = context.ops["gdn_decode"].attrs
    attrs |= step.attrs
    attrs = {n: value for n, value in attrs.items() if n in known}
    for node in (norm, step, conv):
        detach(node)
    node = add_node(context.ops, norm.name, "gdn_decode", [*operands, *scales], outputs, **attrs)
    context.graph.nodes.append(node)


GDN_DECODE = Rule("gdn_decode", find_decode, can_fuse, fuse_decode)


def find_prefill(context: RewriteContext, node: gs.Node) -> Match | None:
    """gated_delta_chunk(causal_conv(qkvz), ba)."""
    conv = producer(node.inputs[0]) if is_op(node, "gated_delta_chunk") else None
    return Match(node, {"conv": conv}) if conv is not None and is_op(conv, "causal_conv") else None


def can_fuse_prefill(context: RewriteContext, match: Match) -> str | None:
    """Refuses if another node reads what the convolution makes, or if the rule reads other rows."""
    rule, conv = match.root, match.parts["conv"]
    alone = read_alone(context.graph, (conv.outputs[0],))
    return alone or _other_rows(conv, rule, PREFILL_ROWS)


def fuse_prefill(context: RewriteContext, match: Match) -> None:
    """gdn_prefill(…) -> o, conv_state', gdn_state', [gdn_ring']; it keeps the rule's name."""
    rule, conv = match.root, match.parts["conv"]
    qkvz, conv_weight, conv_state, *_ = conv.inputs
    _, ba, *rest = rule.inputs
    o, *states = rule.outputs
    operands, outputs = [qkvz, ba, conv_weight, conv_state, *rest], [o, conv.outputs[1], *states]
    attrs = dict(rule.attrs)
    for node in (rule, conv):
        detach(node)
    node = add_node(context.ops, rule.name, "gdn_prefill", operands, outputs, **attrs)
    context.graph.nodes.append(node)


GDN_PREFILL = Rule("gdn_prefill", find_prefill, can_fuse_prefill, fuse_prefill)
