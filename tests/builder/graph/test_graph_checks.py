"""Every check sees its fault, and a legal graph passes."""

from collections.abc import Callable
from dataclasses import replace

import onnx_graphsurgeon as gs
import pytest

from spark_engine.builder.graph import graph_checks as checks
from spark_engine.builder.graph.edit import variable
from spark_engine.builder.graph.graph_checks import Subject
from spark_engine.builder.graph.memory import owners
from spark_engine.errors import GraphError
from spark_engine.interface import Limits
from spark_engine.models.weights.recipes import source, weight
from spark_engine.operand import Result, When
from spark_engine.tensors import DType, TensorSpec
from tests.builder.toy import OPS, toy_graph

LIMITS = Limits(2, 64, 2, 5)
STATES = {"total": (TensorSpec("total", DType.F32, ("rows", 3)), "slot")}
CHECKS = (
    *(checks.known_ops, checks.operands, checks.wiring, checks.order, checks.inference),
    *(checks.states, checks.hazards, checks.no_state_copies),
    *(checks.no_quantisers, checks.launches),
)


def subject(graph: gs.Graph) -> Subject:
    weights = {name: weight(name, source(name, DType.F32, (2, 3))) for name in ("w", "x")}
    return Subject(graph, "decode", LIMITS, STATES, weights, OPS)


def complaints(graph: gs.Graph) -> dict[str, list[str]]:
    found = {check.__name__: list(check(subject(graph))) for check in CHECKS}
    return {name: words for name, words in found.items() if words}


def f32(name: str, *shape: int | str) -> gs.Variable:
    return variable(TensorSpec(name, DType.F32, shape))


def test_a_legal_graph_has_no_complaints() -> None:
    assert complaints(toy_graph()) == {}


def unknown(g: gs.Graph) -> None:
    g.nodes[0].op = "triple"


def foreign(g: gs.Graph) -> None:
    g.nodes[1].op = "Softmax"


def attribute(g: gs.Graph) -> None:
    g.nodes[0].attrs["speed"] = 3


def operand(g: gs.Graph) -> None:
    g.nodes[0].inputs.append(g.inputs[0])


def dangling(g: gs.Graph) -> None:
    g.nodes[1].inputs[1] = f32("nowhere", "rows", 3)


def twice(g: gs.Graph) -> None:
    g.nodes[1].outputs.append(g.nodes[0].outputs[0])


def same_name(g: gs.Graph) -> None:
    g.nodes[0].outputs[0].name = "x"


def disorder(g: gs.Graph) -> None:
    g.nodes.reverse()


def dtype(g: gs.Graph) -> None:
    g.nodes[0].outputs[0].dtype = DType.BF16.numpy


def broadcast(g: gs.Graph) -> None:
    g.inputs[1].shape = [3]


def shape(g: gs.Graph) -> None:
    g.nodes[0].outputs[0].shape = ["rows", 4]


def too_few(g: gs.Graph) -> None:
    g.nodes[2].inputs = g.nodes[2].inputs[:1]


def written_input(g: gs.Graph) -> None:
    g.inputs[0].inputs.append(g.nodes[2])


def self_reading(g: gs.Graph) -> None:
    g.nodes[0].inputs = [g.nodes[0].outputs[0]]


def joined_rows(g: gs.Graph) -> None:
    g.nodes[1].op, g.nodes[1].attrs["axis"] = "Concat", 0


def state_of_another(g: gs.Graph) -> None:
    g.nodes[2].inputs[1] = g.inputs[1]


def state_shape(g: gs.Graph) -> None:
    g.outputs[0].shape = ["rows", 4]


def state_gathered(g: gs.Graph) -> None:
    part = f32("part", "rows", 3)
    g.nodes.insert(0, gs.Node("Gather", name="g", inputs=[g.inputs[2]], outputs=[part]))


def state_lost(g: gs.Graph) -> None:
    g.outputs[0].name = "other"


def state_replaced(g: gs.Graph) -> None:
    last = g.nodes[2]
    last.op, last.inputs = "double", [last.inputs[0]]


def read_late(g: gs.Graph) -> None:
    late = f32("late", "rows", 3)
    g.nodes.append(
        gs.Node("double", name="late", inputs=[g.inputs[2]], outputs=[late], domain="spark")
    )


def state_copy(g: gs.Graph) -> None:
    copy = f32("copy", "rows", 3)
    node = gs.Node("Concat", name="c", attrs={"axis": 1}, inputs=[g.inputs[2]], outputs=[copy])
    g.nodes.insert(0, node)


def twice_updated(g: gs.Graph) -> None:
    """total.out = accumulate(accumulate(total)): a chain of two."""
    half = f32("half", "rows", 3)
    last = g.nodes[2]
    total, last.inputs = g.inputs[2], [last.inputs[0], half]
    first = gs.Node(
        "accumulate", name="first", inputs=[g.inputs[0], total], outputs=[half], domain="spark"
    )
    g.nodes.insert(0, first)


def chain_lost(g: gs.Graph) -> None:
    """What follows total.out in its memory is what the next launch finds."""
    node = gs.Node("accumulate", name="more", domain="spark")
    node.inputs, node.outputs = [g.inputs[0], g.outputs[0]], [f32("more", "rows", 3)]
    g.nodes.append(node)


def chain_of_another(g: gs.Graph) -> None:
    twice_updated(g)
    g.nodes[0].inputs[1] = g.inputs[1]


def forked(g: gs.Graph) -> None:
    twice_updated(g)
    g.nodes[-1].inputs[1] = g.inputs[2]


def read_inside(g: gs.Graph) -> None:
    """A value of the chain is read after the node that changes it."""
    twice_updated(g)
    node = gs.Node("double", name="late", domain="spark")
    node.inputs, node.outputs = [g.nodes[0].outputs[0]], [f32("late", "rows", 3)]
    g.nodes.append(node)


def alone(g: gs.Graph) -> None:
    g.nodes[0].op = "round"


def crowded(g: gs.Graph) -> None:
    for i in range(21):
        out = f32(f"o{i}", "rows", 3)
        name = f"layers.0.n{i}"
        g.nodes.append(
            gs.Node("double", name=name, inputs=[g.inputs[0]], outputs=[out], domain="spark")
        )


@pytest.mark.parametrize(
    ("spoil", "check", "words"),
    [
        (unknown, "known_ops", "spark::triple"),
        (foreign, "known_ops", "onnx::Softmax"),
        (attribute, "operands", "unknown ['speed']"),
        (operand, "operands", "has 2 inputs"),
        (dangling, "wiring", "which nothing writes"),
        (twice, "wiring", "h is written 2 times"),
        (same_name, "wiring", "2 tensors are named 'x'"),
        (disorder, "order", "comes before"),
        (dtype, "inference", "writes h bf16"),
        (broadcast, "inference", "no broadcasting"),
        (shape, "inference", "writes h f32"),
        (too_few, "operands", "has 1 inputs"),
        (written_input, "wiring", "x is written 1 times"),
        (self_reading, "order", "h comes before h"),
        (joined_rows, "inference", "must join last axes"),
        (state_of_another, "states", "not an in-place update of total"),
        (state_shape, "states", "total.out is total.out f32"),
        (state_gathered, "no_state_copies", "Gather g copies state total"),
        (state_lost, "states", "has no output total.out"),
        (chain_lost, "states", "total.out is not the last update of total"),
        (chain_of_another, "states", "total.out is not an in-place update of total"),
        (forked, "hazards", "last read total after first has changed it"),
        (read_inside, "hazards", "late read half after last has changed it"),
        (state_replaced, "states", "not an in-place update"),
        (read_late, "hazards", "late read total after last"),
        (state_copy, "no_state_copies", "Concat c copies state total"),
        (alone, "no_quantisers", "round h was left standing alone"),
        (crowded, "launches", "21 launches"),
    ],
)
def test_each_fault_is_seen(spoil: Callable[[gs.Graph], None], check: str, words: str) -> None:
    graph = toy_graph()
    spoil(graph)
    known = [c for c in CHECKS if c.__name__ == check]
    assert words in " ".join(known[0](subject(graph)))


@pytest.mark.parametrize(
    ("count", "tile", "legal"),
    [(0, 0, False), (1, 0, True), (2, 0, True), (3, 0, False), (1, 4, False), (2, 4, True)],
)
def test_operands_are_those_of_the_attributes(count: int, tile: int, legal: bool) -> None:
    """`x`, `table` if tile, and `bias` or none."""
    graph = toy_graph()
    x = OPS["double"].operands[0]
    table, bias = replace(x, name="table", when=When("tile")), replace(x, optional=True)
    double = replace(OPS["double"], operands=(x, table, bias), attrs={"tile": 0})
    graph.nodes[0].inputs = [graph.inputs[1]] * count
    graph.nodes[0].attrs = {"tile": tile}
    found = list(checks.operands(replace(subject(graph), ops={**OPS, "double": double})))
    assert not found if legal else f"has {count} inputs" in found[0]


@pytest.mark.parametrize(("count", "legal"), [(0, False), (1, True), (2, True), (5, True)])
def test_a_last_result_may_repeat(count: int, legal: bool) -> None:
    """`y` and any number of `parts*`."""
    graph = toy_graph()
    results = (*OPS["double"].results, Result("parts*"))
    ops = {**OPS, "double": replace(OPS["double"], results=results)}
    graph.nodes[0].outputs = [graph.outputs[0]] * count
    found = list(checks.operands(replace(subject(graph), ops=ops)))
    assert not found if legal else "has 0 outputs" in found[0]


def test_a_missing_attribute_is_named() -> None:
    ops = {**OPS, "double": replace(OPS["double"], attrs={"eps": None, "tile": 1})}
    found = list(checks.operands(replace(subject(toy_graph()), ops=ops)))
    assert found == ["double h: attributes unknown [], missing ['eps']"]


def test_as_many_launches_as_the_limit_are_legal() -> None:
    graph = toy_graph()
    crowded(graph)
    graph.nodes.pop()
    assert not list(checks.launches(subject(graph)))


def test_a_state_may_be_updated_in_a_chain() -> None:
    graph = toy_graph()
    twice_updated(graph)
    assert complaints(graph) == {}
    shared = owners(graph, OPS)
    assert [shared[id(t)].name for t in (graph.nodes[0].outputs[0], graph.outputs[0])] == [
        "total",
        "total",
    ]


@pytest.mark.parametrize(("name", "rests"), [("positions", 1), ("total", 0), ("drafts", 1)])
def test_few_states_may_rest(name: str, rests: bool) -> None:
    """Prefill does not define where a sequence's next round starts; every other state continues."""
    graph = toy_graph()
    graph.inputs[2].name = name
    graph.nodes[2].op, graph.nodes[2].inputs = "double", graph.nodes[2].inputs[:1]
    graph.outputs[0].name = "y"
    held = replace(subject(graph), states={name: STATES["total"]})
    found = list(checks.states(held))
    assert found == ([] if rests else [f"state {name} has no output {name}.out"])


def test_a_state_that_is_updated_does_not_rest() -> None:
    graph = toy_graph()
    graph.inputs[2].name, graph.outputs[0].name = "drafts", "y"
    held = replace(subject(graph), states={"drafts": STATES["total"]})
    assert list(checks.states(held)) == ["state drafts has no output drafts.out"]


@pytest.mark.parametrize(
    ("family", "found"), [("decode", 1), ("verify_k1", 1), ("verify_k7", 1), ("prefill", 0)]
)
def test_what_holds_for_decode_holds_where_drafts_are_verified(family: str, found: int) -> None:
    graph = toy_graph()
    alone(graph)
    crowded(graph)
    held = replace(subject(graph), family=family)
    assert len(list(checks.no_quantisers(held))) == found
    assert len(list(checks.launches(held))) == 1 or family == "prefill"


def test_outputs_have_their_dtype_and_shape() -> None:
    graph = toy_graph()
    for name, dtype in (("next_tokens", DType.I64), ("ok", DType.I32)):
        graph.outputs.append(variable(TensorSpec(name, dtype, ("rows",))))
    found = [c.split()[1] for c in checks.outputs(subject(graph))]
    assert found == ["next_tokens", "logprobs", "top_ids", "top_logprobs", "logits"]


def test_inputs_and_outputs_are_those_of_the_interface() -> None:
    graph = toy_graph()
    assert not list(checks.inputs(subject(graph)))
    stranger = replace(subject(graph), weights={})
    assert any("neither step, table, state nor weight" in c for c in checks.inputs(stranger))
    graph.inputs.append(variable(TensorSpec("slots", DType.F32, ("rows",))))
    assert any("input slots is slots f32" in c for c in checks.inputs(subject(graph)))
    missing = list(checks.outputs(subject(graph)))
    assert len(missing) == 6 and "next_tokens" in missing[0]


def test_verify_names_family_stage_and_check() -> None:
    with pytest.raises(GraphError, match="decode graph, stage rewritten, outputs: .* more"):
        checks.verify(subject(toy_graph()), "rewritten")


def prefilling(graph: gs.Graph, given: tuple[str, ...], unit: str = "sequence") -> Subject:
    """Of prefill; `last` updates a state of `unit`, and reads `given` of the launch's steps."""
    named = {name: variable(TensorSpec(name, DType.I32, ("rows",))) for name in checks.ELSEWHERE}
    graph.inputs += [*named.values()]
    graph.nodes[2].inputs += [named[name] for name in given]
    state = {"total": (STATES["total"][0], unit)}
    return replace(subject(graph), family="prefill", states=state)


@pytest.mark.parametrize(
    ("family", "unit", "given", "legal"),
    [
        ("prefill", "sequence", ("sources", "saves"), True),
        ("prefill", "sequence", (), False),
        ("prefill", "sequence", ("sources",), False),
        ("prefill", "sequence", ("saves", "sources"), False),
        ("prefill", "slot", ("sources", "saves"), False),
        ("prefill", "slot", (), True),
        ("decode", "sequence", ("sources", "saves"), False),
        ("decode", "sequence", (), True),
    ],
)
def test_which_nodes_read_sources_and_saves(
    family: str, unit: str, given: tuple[str, ...], legal: bool
) -> None:
    found = [*checks.elsewhere(replace(prefilling(toy_graph(), given, unit), family=family))]
    assert not found if legal else f"accumulate last reads {len(given)} of sources and" in found[0]


@pytest.mark.parametrize(("unit", "rows"), [("slot", 3), ("page", 8), ("sequence", 8)])
def test_a_state_has_a_row_for_each_unit(unit: str, rows: int) -> None:
    limits = Limits(2, 64, 7, 5, snapshots=5)
    for given in (rows, rows + 1):
        states = {"total": (TensorSpec("total", DType.F32, (given, 3)), unit)}
        found = [
            *checks.rows_of_states(replace(subject(toy_graph()), limits=limits, states=states))
        ]
        assert found == (
            [] if given == rows else [f"state total has {given} rows, by {unit} it has {rows}"]
        )
