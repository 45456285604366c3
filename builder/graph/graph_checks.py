"""What a legal graph is at each stage, as data; run between all stages of a build.

Knows the interface every engine shares and the Op contract; knows no single rule. A check is a
function from a subject to complaints; a stage is a tuple of checks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from spark_engine import interface
from spark_engine.builder.graph.family import FamilyGraph
from spark_engine.builder.graph.nodes import (
    Ops,
    aliases,
    attrs_of,
    consumers,
    is_standard,
    producer,
    spec_of,
)
from spark_engine.builder.graph.packing import Packing
from spark_engine.errors import GraphError
from spark_engine.interface import STATE_OUT, Limits
from spark_engine.manifest import IMAGE, PAGE, SEQUENCE, SLOT
from spark_engine.models.weights.recipes import Weight
from spark_engine.op import DOMAIN, Op
from spark_engine.plugins.registry import STANDARD
from spark_engine.tensors import TensorSpec

COPIES = frozenset({"Concat", "Gather", "GatherND", "Slice", "Split", "Identity", "Transpose"})
READ_ONLY = frozenset({"positions", "drafts", "image_rows"})  # states that some families only read
ELSEWHERE = ("sources", "saves")  # steps: rows of the states by sequence
LAYER_LAUNCHES = 20  # nodes of one decode layer at most, when nothing can be merged; 10 is usual
SHOWN = 5  # complaints in one message


@dataclass(frozen=True)
class Subject:
    """A graph and what it is checked against. `states`: (spec, unit) by name."""

    graph: gs.Graph
    family: str
    limits: Limits
    states: dict[str, tuple[TensorSpec, str]]
    weights: Mapping[str, Weight]
    ops: Ops

    @classmethod
    def of(cls, graph: FamilyGraph, limits: Limits, ops: Ops) -> Subject:
        states = {spec.name: (spec, unit) for spec, unit in graph.states}
        return cls(graph.graph, graph.family, limits, states, graph.weights, ops)


Check = Callable[[Subject], Iterator[str]]


def verify(subject: Subject, stage: str) -> None:
    """Raises GraphError with the first complaints if the graph is illegal at `stage`."""
    for check in STAGES[stage]:
        found = list(check(subject))
        if found:
            more = f" (and {len(found) - SHOWN} more)" if len(found) > SHOWN else ""
            where = f"{subject.family} graph, stage {stage}, {check.__name__}"
            raise GraphError(f"{where}: {'; '.join(found[:SHOWN])}{more}")


def known_ops(s: Subject) -> Iterator[str]:
    """Every node is an op of the domain `spark` or one of few standard operators."""
    for node in s.graph.nodes:
        known = node.op in s.ops if node.domain == DOMAIN else is_standard(node, *STANDARD)
        if not known:
            yield f"node {node.name} is {node.domain or 'onnx'}::{node.op}, which is not known"


def operands(s: Subject) -> Iterator[str]:
    """Operand counts and attributes are those that the op declares."""
    for node in _ours(s):
        op = s.ops[node.op]
        given, made = op.given(attrs_of(node, op)), op.made(attrs_of(node, op))
        most, repeats = len(given), bool(made) and made[-1].name.endswith("*")
        if not most - sum(o.optional for o in given) <= len(node.inputs) <= most:
            names = tuple(o.name for o in given)
            yield f"{node.op} {node.name} has {len(node.inputs)} inputs, declared {names}"
        least = len(made) - repeats
        if not (least <= len(node.outputs) if repeats else least == len(node.outputs)):
            names = tuple(r.name for r in made)
            yield f"{node.op} {node.name} has {len(node.outputs)} outputs, declared {names}"
        yield from _attributes(node, op)


def wiring(s: Subject) -> Iterator[str]:
    """Every tensor that is read is written once or is an input, and names are unique."""
    given = {id(t) for t in s.graph.inputs}
    for node in s.graph.nodes:
        for tensor in node.inputs:
            if (
                not tensor.inputs
                and id(tensor) not in given
                and not isinstance(tensor, gs.Constant)
            ):
                yield f"{node.name} reads {tensor.name!r}, which nothing writes"
        for tensor in node.outputs:
            if len(tensor.inputs) != 1 or id(tensor) in given:
                yield f"{tensor.name} is written {len(tensor.inputs)} times"
    yield from _twice(s)


def order(s: Subject) -> Iterator[str]:
    """Nodes are in execution order (so there is no cycle)."""
    seen: set[int] = set()
    for node in s.graph.nodes:
        for tensor in node.inputs:
            source = producer(tensor)
            if source is not None and id(source) not in seen:
                yield f"{node.name} comes before {source.name} but reads its result"
        seen.add(id(node))


def inference(s: Subject) -> Iterator[str]:
    """Every node's outputs have the dtype and shape that shape inference gives."""
    for node in s.graph.nodes:
        try:
            wanted = _inferred(s, node) if node.domain == DOMAIN else _standard(node)
        except GraphError as error:
            yield f"{node.name}: {error}"
            continue
        got = [spec_of(t) for t in node.outputs]
        if [(w.dtype, w.shape) for w in wanted] != [(g.dtype, g.shape) for g in got]:
            yield f"{node.op} {node.name} writes {_show(got)}, inferred {_show(wanted)}"


def layouts(s: Subject) -> Iterator[str]:
    """Every weight has the layout that its reader packs, and no other operand is packed."""
    for node in _ours(s):
        op = s.ops[node.op]
        attrs = attrs_of(node, op)
        names = op.names(attrs, len(node.inputs))
        for name, tensor in zip(names, node.inputs, strict=False):
            packing, its = _packing(s, tensor), op.cuda.packs.get(name)
            if packing is None and its is not None:
                yield f"{node.op} {node.name} reads {tensor.name}, which is not packed"
            elif packing is not None:
                if its is None or packing != Packing.of(op, name, attrs):
                    yield f"{node.op} {node.name} reads {tensor.name}, packed for another operand"
                elif (spec := packing.spec(_unpacked(s, tensor))) != spec_of(tensor):
                    yield f"{tensor.name} is {_show([spec_of(tensor)])}, packed {_show([spec])}"


def inputs(s: Subject) -> Iterator[str]:
    """The inputs are the steps, tables and states of docs/graph.md, and weights; no other."""
    wanted = {
        t.name: t
        for t in (*interface.steps(s.family, s.limits.drafts), *interface.tables(s.limits))
    }
    wanted |= {name: spec for name, (spec, _) in s.states.items()}
    for tensor in s.graph.inputs:
        spec = spec_of(tensor)
        if spec.name in wanted and wanted[spec.name] != spec:
            yield f"input {spec.name} is {_show([spec])}, not {_show([wanted[spec.name]])}"
        if spec.name not in wanted and spec.name not in s.weights:
            yield f"input {spec.name} is neither step, table, state nor weight"


def outputs(s: Subject) -> Iterator[str]:
    """Every output of docs/graph.md is there with its dtype and shape."""
    found = {t.name: spec_of(t) for t in s.graph.outputs}
    ranks = max(
        (int(n.attrs.get("ranks", 1)) for n in s.graph.nodes if n.op == "sample"), default=1
    )
    for spec in interface.outputs(s.limits, s.family, ranks):
        if found.get(spec.name) != spec:
            yield f"output {spec.name} is {found.get(spec.name)}, not {_show([spec])}"


def states(s: Subject) -> Iterator[str]:
    """Every state is an output: the last of a chain of updates in place that starts at the input. A
    state of RESTING need not be updated, and then is no output."""
    found = {t.name: t for t in s.graph.outputs}
    shared = {id(out): source for n in s.graph.nodes for out, source in aliases(n, s.ops)}
    changed = {id(source) for source in shared.values()}
    given = {t.name: t for t in s.graph.inputs}
    for name, (spec, _) in s.states.items():
        out = found.get(name + STATE_OUT)
        if out is None:
            if name not in READ_ONLY or id(given.get(name)) in changed:
                yield f"state {name} has no output {name}{STATE_OUT}"
            continue
        if _first(out, shared) is not given.get(name):
            yield f"{out.name} is not an in-place update of {name}"
        elif id(out) in changed:
            yield f"{out.name} is not the last update of {name}"
        elif spec_of(out).bind({}) != TensorSpec(out.name, spec.dtype, spec.shape):
            yield f"{out.name} is {_show([spec_of(out)])}, not {_show([spec])}"


def _first(tensor: gs.Tensor, shared: Mapping[int, gs.Tensor]) -> gs.Tensor:
    """The start of the chain of updates that ends in the tensor."""
    while id(tensor) in shared:
        tensor = shared[id(tensor)]
    return tensor


def rows_of_states(s: Subject) -> Iterator[str]:
    """A state has a row for each unit that the limits count, and a scratch row."""
    limits = s.limits
    rows = {SLOT: limits.max_seqs + 1, PAGE: limits.pages + 1, SEQUENCE: limits.sequence_rows}
    rows[IMAGE] = limits.image_rows + 1
    for name, (spec, unit) in s.states.items():
        if spec.shape[0] != rows[unit]:
            yield f"state {name} has {spec.shape[0]} rows, by {unit} it has {rows[unit]}"


def elsewhere(s: Subject) -> Iterator[str]:
    """In prefill, nodes that update a state by sequence read `sources` and `saves`; no other node
    does."""
    given = {t.name: t for t in s.graph.inputs}
    given_rows = [id(given[name]) for name in ELSEWHERE if name in given]
    kept = {id(given[name]) for name, (_, unit) in s.states.items() if unit == SEQUENCE}
    for node in s.graph.nodes:
        read = [id(t) for t in node.inputs if id(t) in given_rows]
        updates = any(id(source) in kept for _, source in aliases(node, s.ops))
        wanted = len(ELSEWHERE) if updates and s.family == interface.PREFILL else 0
        if read != given_rows[:wanted] or len(read) < wanted:
            yield f"{node.op} {node.name} reads {len(read)} of {' and '.join(ELSEWHERE)}"


def hazards(s: Subject) -> Iterator[str]:
    """No node reads a state's value after the node that updates it in place."""
    step = {id(node): i for i, node in enumerate(s.graph.nodes)}
    for node in s.graph.nodes:
        for _, source in aliases(node, s.ops):
            late = [n.name for n in consumers(source) if step[id(n)] > step[id(node)]]
            if late:
                yield f"{', '.join(late)} read {source.name} after {node.name} has changed it"


def no_state_copies(s: Subject) -> Iterator[str]:
    """No operator gathers, joins or copies a state: ops index into it."""
    for node in s.graph.nodes:
        for tensor in (*node.inputs, *node.outputs):
            name = tensor.name.removesuffix(STATE_OUT)
            if node.domain != DOMAIN and node.op in COPIES and name in s.states:
                yield f"{node.op} {node.name} copies state {name}"


def no_quantisers(s: Subject) -> Iterator[str]:
    """Except in prefill, the op that makes a value quantises it. The draft head's input is not
    quantised by its op, nor are a block drafter's: most read them unquantised. Nor is what heads
    make, where a scale is of a token: their blocks do not know it."""
    blocks = ("block_conv", "block_attention", "Concat")
    for node in _ours(s):
        if s.family == interface.PREFILL or not s.ops[node.op].quantises:
            continue
        maker, heads = producer(node.inputs[0]), ("attention_decode", "gdn_decode")
        drafts = node.name.startswith((*interface.HEADS, interface.DRAFT_STEP))
        alone = (
            "mtp_input",
            *(blocks if drafts else ()),
            *(heads if node.attrs.get("by_token") else ()),
        )
        if maker is None or maker.op not in alone:
            yield f"{node.op} {node.name} was left standing alone"


def launches(s: Subject) -> Iterator[str]:
    """Except in prefill, a layer is few launches, and so is a draft."""
    for kind in ("layers", "draft") if s.family != interface.PREFILL else ():
        for number, count in launches_per_layer(s.graph, kind).items():
            if count > LAYER_LAUNCHES:
                name = kind.removesuffix("s")
                yield f"{name} {number} has {count} launches; the limit is {LAYER_LAUNCHES}"


_WELL_FORMED: tuple[Check, ...] = (known_ops, operands, wiring, order, inference)
_INTERFACE: tuple[Check, ...] = (
    *(inputs, outputs, states, rows_of_states, elsewhere, hazards, no_state_copies),
)
STAGES: dict[str, tuple[Check, ...]] = {
    "lowered": (*_WELL_FORMED, *_INTERFACE),
    "rewritten": (*_WELL_FORMED, *_INTERFACE, no_quantisers, launches),
    "packed": (*_WELL_FORMED, *_INTERFACE, layouts),
}


def launches_per_layer(graph: gs.Graph, kind: str = "layers") -> dict[int, int]:
    """Nodes by layer (their names start with `layers.{i}.`) or by draft (`draft.{i}.`)."""
    found = (re.match(rf"{kind}\.(\d+)\.", node.name) for node in graph.nodes)
    return dict(sorted(Counter(int(m.group(1)) for m in found if m).items()))


def _packing(s: Subject, tensor: gs.Tensor) -> Packing | None:
    weight = s.weights.get(tensor.name)
    function = weight.recipe.function if weight else None
    return function if isinstance(function, Packing) else None


def _unpacked(s: Subject, tensor: gs.Tensor) -> TensorSpec:
    """The spec for shape inference: a packed weight's spec before packing."""
    packing = _packing(s, tensor)
    if packing is None:
        return spec_of(tensor)
    source = s.weights[tensor.name].recipe.args[0]
    name = tensor.name.removesuffix(packing.suffix)
    return TensorSpec(name, source.dtype, source.shape)


def _inferred(s: Subject, node: gs.Node) -> tuple[TensorSpec, ...]:
    op = s.ops[node.op]
    return op.infer(attrs_of(node, op), tuple(_unpacked(s, t) for t in node.inputs))


def _ours(s: Subject) -> Iterator[gs.Node]:
    return (n for n in s.graph.nodes if n.domain == DOMAIN)


def _attributes(node: gs.Node, op: Op) -> Iterator[str]:
    unknown = set(node.attrs) - set(op.attrs)
    missing = [k for k in op.attrs if k not in attrs_of(node, op)]
    if unknown or missing:
        yield f"{node.op} {node.name}: attributes unknown {sorted(unknown)}, missing {missing}"


def _twice(s: Subject) -> Iterator[str]:
    tensors = {id(t): t for n in s.graph.nodes for t in (*n.inputs, *n.outputs)}
    tensors |= {id(t): t for t in (*s.graph.inputs, *s.graph.outputs)}
    for what, names in (
        ("tensors", Counter(t.name for t in tensors.values())),
        ("nodes", Counter(n.name for n in s.graph.nodes)),
    ):
        yield from (
            f"{count} {what} are named {name!r}" for name, count in names.items() if count > 1
        )


def _standard(node: gs.Node) -> list[TensorSpec]:
    """Shape inference of the few standard operators that a graph may hold."""
    specs = [spec_of(t) for t in node.inputs]
    first = specs[0]
    if node.op == "Add":
        if any((s.dtype, s.shape) != (first.dtype, first.shape) for s in specs):
            raise GraphError(f"Add of {_show(specs)}: there is no broadcasting here")
        return [first]
    rest = {(s.dtype, s.shape[:-1]) for s in specs}
    widths = [s.shape[-1] for s in specs]
    if len(rest) != 1 or node.attrs.get("axis") not in (-1, len(first.shape) - 1):
        raise GraphError(f"Concat of {_show(specs)} must join last axes of one dtype")
    if not all(isinstance(w, int) for w in widths):
        raise GraphError(f"Concat of {_show(specs)}: an unbound last dimension")
    total = sum(int(w) for w in widths)
    return [TensorSpec(node.outputs[0].name, first.dtype, (*first.shape[:-1], total))]


def _show(specs: list[TensorSpec] | tuple[TensorSpec, ...]) -> str:
    return ", ".join(f"{s.name} {s.dtype}{list(s.shape)}" for s in specs)
