"""Rules that concatenate weights: projections of one input; the shared expert and the routed ones.

Knows which operands of each linear op are joined and which must agree (docs/graph.md). Joined
weights are recipes over the checkpoint; nothing is read or copied here.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_graphsurgeon as gs

from spark_engine.builder.graph.edit import add_node, detach
from spark_engine.builder.graph.nodes import consumers, is_op, is_standard, producer, read_alone
from spark_engine.builder.graph.rewrite import Match, RewriteContext, Rule
from spark_engine.builder.rules import weights
from spark_engine.builder.rules.quant import QUANT
from spark_engine.errors import GraphError
from spark_engine.models.weights.recipes import Recipe
from spark_engine.op import Op
from spark_engine.plugins.formats.registry import FORMATS
from spark_engine.plugins.ops.linear.linear import format_of
from spark_engine.plugins.registry import OPS


@dataclass(frozen=True)
class Operands:
    """A linear op's operands: those that all merged projections share, and those joined by rows.

    `block`: rows of the result that one entry of the coarsest joined operand covers.
    """

    shared: tuple[int, ...]
    joined: tuple[int, ...]
    block: int

    @classmethod
    def of(cls, op: Op) -> Operands:
        joins = [operand.joins for operand in op.given({})]
        shared, joined = ([i for i, n in enumerate(joins) if bool(n) is b] for b in (False, True))
        return cls(tuple(shared), tuple(joined), max(joins))

    @property
    def weight(self) -> int:
        return self.joined[0]


LINEARS = {op.name: Operands.of(op) for op in OPS if any(o.joins for o in op.operands)}


def find_concat(context: RewriteContext, node: gs.Node) -> Match | None:
    """A Concat of results of linear ops only."""
    if not is_standard(node, "Concat"):
        return None
    makers = [producer(t) for t in node.inputs]
    found = [m for m in makers if m is not None and is_op(m, *LINEARS)]
    return Match(node, {"linears": found}) if len(found) == len(node.inputs) else None


def can_merge(context: RewriteContext, match: Match) -> str | None:
    """Refuses projections of different kinds or inputs, and a partial result with other readers."""
    linears: list[gs.Node] = match.parts["linears"]
    first = linears[0]
    kinds = sorted({n.op for n in linears})
    if len(kinds) > 1:
        return f"the projections are stored differently: {', '.join(kinds)}"
    roles = LINEARS[first.op]
    for other in linears[1:]:
        if other.attrs != first.attrs:
            return f"{other.name} and {first.name} have different attributes"
        for i in roles.shared:
            if not weights.same_value(context, other.inputs[i], first.inputs[i]):
                return f"{other.name} and {first.name} read inputs quantised differently"
        if any(other.inputs[i].dtype != first.inputs[i].dtype for i in roles.joined):
            return f"{other.name} and {first.name} have weights of different dtypes"
    alone = read_alone(context.graph, [n.outputs[0] for n in linears])
    return alone or _block_fits(first, linears)


def merge(context: RewriteContext, match: Match) -> None:
    """One linear over the joined weights writes what the Concat wrote."""
    linears: list[gs.Node] = match.parts["linears"]
    first, out = linears[0], match.root.outputs[0]
    roles, inputs = LINEARS[first.op], list(first.inputs)
    for i in roles.joined:
        inputs[i] = weights.concat(context, [n.inputs[i] for n in linears])
    op, attrs = first.op, dict(first.attrs)
    for node in (match.root, *linears):
        detach(node)
    context.graph.nodes.append(add_node(context.ops, out.name, op, inputs, [out], **attrs))


def _block_fits(first: gs.Node, linears: list[gs.Node]) -> str | None:
    """Scale blocks of many rows can be joined only if the weight's rows are a multiple of
    theirs."""
    roles = LINEARS[first.op]
    for linear in linears[:-1]:
        rows = linear.inputs[roles.weight].shape[0]
        if rows % roles.block:
            return (
                f"{linear.name} has {rows} rows, not a multiple of its {roles.block}-row scale "
                "blocks"
            )
    return None


def find_shared_expert(context: RewriteContext, node: gs.Node) -> Match | None:
    """shared_gate(grouped_moe(…), down(act(gate_up(x))), x, w)."""
    if not is_op(node, "shared_gate"):
        return None
    routed, down = producer(node.inputs[0]), producer(node.inputs[1])
    if routed is None or not is_op(routed, "grouped_moe"):
        return None
    if down is None or not is_op(down, *LINEARS):
        return None
    act = _maker(down.inputs[0])
    gate_up = producer(act.inputs[0]) if act is not None and is_op(act, "silu_mul") else None
    router = producer(routed.inputs[1])
    if gate_up is None or router is None:
        return None
    return Match(node, {"routed": routed, "router": router, "down": down, "gate_up": gate_up})


def can_join_expert(context: RewriteContext, match: Match) -> str | None:
    """The shared expert is stored and sized like a routed one."""
    routed, down, gate_up = (match.parts[k] for k in ("routed", "down", "gate_up"))
    stored = sorted({format_of(n.op, n.attrs) for n in (down, gate_up)})
    if stored != [routed.attrs["format"]]:
        return f"the shared expert is {' and '.join(stored)}, the routed {routed.attrs['format']}"
    if len(consumers(routed.outputs[0])) > 1 or len(match.parts["router"].inputs) > 2:
        return "the routed result is also read elsewhere"
    for mine, stack in _pairs(context, match):
        theirs = weights.recipe_of(context, stack)
        if mine.dtype is not theirs.dtype or mine.shape != theirs.shape[1:]:
            return (
                f"{stack.name}: the shared expert's is {mine.dtype}{list(mine.shape)}, a routed "
                f"expert's {theirs.dtype}{list(theirs.shape[1:])}"
            )
    return None


def join_expert(context: RewriteContext, match: Match) -> None:
    """The shared expert becomes the last of the stack, and its gate the router's last weight."""
    node, routed, router = match.root, match.parts["routed"], match.parts["router"]
    x, gate = node.inputs[2:]
    out, routing = node.outputs[0], [t.name for t in router.outputs]
    params = [weights.append_expert(context, stack, mine) for mine, stack in _pairs(context, match)]
    inputs, picks = [routed.inputs[0]], [router.inputs[0], router.inputs[1], gate]
    attrs, router_attrs = dict(routed.attrs), dict(router.attrs)
    for old in (node, routed, router):
        detach(old)
    chosen = add_node(context.ops, routing[0], "moe_router", picks, [*routing], **router_attrs)
    inputs += [*chosen.outputs, *params]
    context.graph.nodes += [
        chosen,
        add_node(context.ops, out.name, "grouped_moe", inputs, [out], **attrs),
    ]


def _pairs(context: RewriteContext, match: Match) -> list[tuple[Recipe, gs.Tensor]]:
    """(shared expert's parameter, the routed experts' stack), in grouped_moe's order."""
    routed, down, gate_up = (match.parts[k] for k in ("routed", "down", "gate_up"))
    makers = (gate_up, down)
    mine = [weights.recipe_of(context, n.inputs[i]) for n in makers for i in LINEARS[n.op].joined]
    inputs, stored = FORMATS[routed.attrs["format"]].inputs, FORMATS[routed.attrs["format"]].stored
    if inputs is not None and inputs.scale:  # the stacks have the input's scales apart
        folded = [operand.name == inputs.scale for operand in stored] * len(makers)
        mine = [
            weights.without_input_scale(m) if both else m
            for m, both in zip(mine, folded, strict=True)
        ]
        mine += [weights.recipe_of(context, _quantiser(n).inputs[1]) for n in makers]
    return list(zip(mine, routed.inputs[3:], strict=True))


def _quantiser(linear: gs.Node) -> gs.Node:
    """The node that quantised a linear's input. Raises GraphError when there is none."""
    node = producer(linear.inputs[0])
    if node is None or not is_op(node, *QUANT):
        raise GraphError(f"{linear.name} reads an input that nothing quantises")
    return node


def _maker(tensor: gs.Tensor) -> gs.Node | None:
    """The node that wrote a value; if that is a quantiser, the node before it."""
    node = producer(tensor)
    return producer(node.inputs[0]) if node is not None and is_op(node, *QUANT) else node


MERGE_PROJECTIONS = Rule("merge_projections", find_concat, can_merge, merge)
SHARED_EXPERT = Rule("shared_expert", find_shared_expert, can_join_expert, join_expert)
