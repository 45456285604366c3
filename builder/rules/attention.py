"""The rule that fuses a decode layer's attention into one launch.

Knows the ops paged_attention, sigmoid_gate, act_quant and attention_decode of docs/graph.md. Runs
after the quantisers are fused into the gate.
"""

import onnx_graphsurgeon as gs

from spark_engine.builder.graph.edit import add_node, detach
from spark_engine.builder.graph.nodes import is_op, producer, read_alone
from spark_engine.builder.graph.rewrite import Match, RewriteContext, Rule
from spark_engine.interface import MOST_DRAFTS


def find_decode(context: RewriteContext, node: gs.Node) -> Match | None:
    """sigmoid_gate, or act_quant of it, over paged_attention of a few tokens a row."""
    gated = is_op(node, "act_quant") and node.attrs["act"] == "sigmoid_gate"
    if not gated and not is_op(node, "sigmoid_gate"):
        return None
    attention = producer(node.inputs[0])
    if attention is None or not is_op(attention, "paged_attention"):
        return None
    few = attention.attrs["tile"] <= 1 + MOST_DRAFTS
    return Match(node, {"attention": attention}) if few else None


def can_fuse(context: RewriteContext, match: Match) -> str | None:
    """Refuses if another node reads a value that the launch no longer stores, or if queries and
    gates are from different projections."""
    attention = match.parts["attention"]
    alone = read_alone(context.graph, attention.outputs[:1])
    if alone is None and attention.inputs[0] is not match.root.inputs[1]:
        return f"{attention.name} and {match.root.name} read different projections"
    return alone


def fuse_decode(context: RewriteContext, match: Match) -> None:
    """attention_decode(…) -> k_pages', v_pages', [y], quantised…; it keeps the gate's name."""
    gate, attention = match.root, match.parts["attention"]
    operands, scales = list(attention.inputs), gate.inputs[2:]
    outputs = [*attention.outputs[1:], *gate.outputs]
    attrs = {"keep": 1, "quant": "none", "n": 1}
    attrs |= {n: gate.attrs[n] for n in attrs if n in gate.attrs}
    known = context.ops["attention_decode"].attrs
    attrs |= {n: value for n, value in attention.attrs.items() if n in known}
    for node in (gate, attention):
        detach(node)
    node = add_node(
        context.ops, gate.name, "attention_decode", [*operands, *scales], outputs, **attrs
    )
    context.graph.nodes.append(node)


ATTENTION_DECODE = Rule("attention_decode", find_decode, can_fuse, fuse_decode)
