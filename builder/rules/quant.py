"""Rules that fuse quantisation into the op that computes the value.

Knows the quantise ops and the fused ops of docs/graph.md. A maker is a norm or activation with a
quantised result. It becomes one node that writes the quantised tensors, and the plain result only
if another node reads it (`keep`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from spark_engine.builder.graph.edit import add_node, detach
from spark_engine.builder.graph.nodes import consumers, is_op, is_output, is_standard, producer
from spark_engine.builder.graph.rewrite import Match, RewriteContext, Rule
from spark_engine.builder.rules.weights import stack_scalars
from spark_engine.interface import MOST_DRAFTS
from spark_engine.plugins.formats.quantised import BY_TOKEN, quant_of
from spark_engine.plugins.registry import OPS

QUANT = tuple(op.name for op in OPS if op.quantises)


@dataclass(frozen=True)
class Made:
    """A maker's result `y`, its quantisers by kind, and whether another node reads `y`."""

    y: gs.Tensor
    groups: tuple[tuple[str, tuple[gs.Node, ...]], ...]
    keep: bool


def made(context: RewriteContext, node: gs.Node) -> Made:
    """The tensor that becomes the node's first output."""
    y = node.outputs[0]
    readers = consumers(y)
    found = [(quant_of(n.op, n.attrs), n) for n in readers if is_op(n, *QUANT)]
    found = [(kind, n) for kind, n in found if kind not in BY_TOKEN or not _heads_apart(node)]
    kinds = dict.fromkeys(kind for kind, _ in found)
    groups = tuple((k, tuple(n for kind, n in found if kind == k)) for k in kinds)
    return Made(y, groups, is_output(context.graph, y) or len(found) < len(readers))


def _heads_apart(node: gs.Node) -> bool:
    """Whether the node ends a decode step of heads: blocks have some each, and none the scale of a
    token, so that its quantiser stays alone."""
    maker = producer(node.inputs[0])
    if maker is None or is_op(maker, "gated_delta_step"):
        return maker is not None
    return is_op(maker, "paged_attention") and maker.attrs["tile"] <= 1 + MOST_DRAFTS


@dataclass(frozen=True)
class Fused:
    """The fused node: its op, operands before the scales, and attributes."""

    op: str
    inputs: Sequence[gs.Tensor]
    attrs: dict[str, object]


def fuse(
    context: RewriteContext, made: Made, first: Fused, extra: Sequence[gs.Tensor], rest: Fused
) -> None:
    """Adds `first`, which writes [y], extra outputs and the first kind's tensors.

    A second kind of quantiser (rare: one value read by FP8 and by NVFP4 modules) becomes a
    node `rest` that makes the value again: cheaper than storing it and reading it back.
    """
    groups = made.groups or (("none", ()),)
    keep = [made.y] if made.keep else []
    _add(context, made.y.name, first, made, groups[0], [*keep, *extra])  # it keeps the maker's name
    for group in groups[1:]:
        _add(context, f"{made.y.name}.{group[0]}", rest, made, group, [])


def _add(
    context: RewriteContext,
    name: str,
    fused: Fused,
    made: Made,
    group: tuple[str, tuple[gs.Node, ...]],
    plain: list[gs.Tensor],
) -> None:
    quant, quantisers = group
    scales = [q.inputs[1] for q in quantisers if len(q.inputs) > 1]
    if scales:
        scales = [stack_scalars(context, f"{made.y.name}.{quant}_scales", scales)]
    outputs = [*plain, *(t for q in quantisers for t in q.outputs)]
    for quantiser in quantisers:
        detach(quantiser)
    for tensor in plain:
        tensor.inputs.clear()
    keep = int(any(t is made.y for t in plain))
    attrs = {**fused.attrs, "keep": keep, "quant": quant, "n": max(1, len(quantisers))}
    node = add_node(context.ops, name, fused.op, [*fused.inputs, *scales], outputs, **attrs)
    context.graph.nodes.append(node)


def find_norm(context: RewriteContext, node: gs.Node) -> Match | None:
    """An rms_norm after a residual addition, or with a quantised result."""
    if not is_op(node, "rms_norm"):
        return None
    add = producer(node.inputs[0])
    add = add if add is not None and is_standard(add, "Add") else None
    found = made(context, node)
    return Match(node, {"add": add, "made": found}) if add or found.groups else None


def fuse_norm(context: RewriteContext, match: Match) -> None:
    """norm_quant(x, weight, [residual], [scales]) -> [y], [sum], quantised…"""
    node, add, found = match.root, match.parts["add"], match.parts["made"]
    x, weight = node.inputs
    attrs = dict(node.attrs)
    detach(node)
    plain = Fused("norm_quant", [x, weight], {**attrs, "add": 0})
    if add is None:
        fuse(context, found, plain, [], plain)
        return
    left, right = add.inputs
    detach(add)
    first = Fused("norm_quant", [left, weight, right], {**attrs, "add": 1})
    fuse(context, found, first, [x], plain)


def _quantised(name: str, *makers: str) -> Rule:
    """The rule that makes an op of any of these, with a quantised result, the op `name`."""

    def find(context: RewriteContext, node: gs.Node) -> Match | None:
        found = made(context, node) if is_op(node, *makers) else None
        return Match(node, {"made": found}) if found and found.groups else None

    def replace(context: RewriteContext, match: Match) -> None:
        node = match.root
        act = {"act": node.op} if "act" in context.ops[name].attrs else {}
        fused = Fused(name, list(node.inputs), {**act, **node.attrs})
        detach(node)
        fuse(context, match.parts["made"], fused, [], fused)

    return Rule(name, find, always, replace)


def always(context: RewriteContext, match: Match) -> str | None:
    return None


def find_fp4(context: RewriteContext, node: gs.Node) -> Match | None:
    """A product of NVFP4 weights and NVFP4 activations."""
    return Match(node, {}) if is_op(node, "nvfp4_linear_a4") else None


def multiply_values(context: RewriteContext, match: Match) -> None:
    """nvfp4_linear(nvfp4_widen(xq, x_scale), w, w_scale, alpha): the same products and scales.

    The activations' values are exact in bf16, so that only the order of f32 sums differs.
    """
    node, nodes = match.root, context.graph.nodes
    (xq, x_scale, *stored), (y,), attrs = node.inputs, list(node.outputs), dict(node.attrs)
    detach(node)
    known = [n for n in consumers(xq) if is_op(n, "nvfp4_widen")]
    if not known:
        name = f"{xq.name}.values"
        known = [add_node(context.ops, name, "nvfp4_widen", [xq, x_scale], [name], dtype="bf16")]
        nodes += known
    x = known[0].outputs[0]
    nodes.append(add_node(context.ops, node.name, "nvfp4_linear", [x, *stored], [y], **attrs))


NORM_QUANT = Rule("norm_quant", find_norm, always, fuse_norm)
# act_quant(x, [qkv], [scales]) and gated_norm_quant(o, packed, weight, [scales]) -> [y], quantised…
ACT_QUANT = _quantised("act_quant", "silu_mul", "sigmoid_gate")
GATED_NORM_QUANT = _quantised("gated_norm_quant", "gated_norm")
# For targets without FP4 matrix instructions.
FP4_VALUES = Rule("fp4_values", find_fp4, always, multiply_values)
