"""What a bucket's header says, whatever executor runs it."""

from spark_engine.builder.executors.header import header
from spark_engine.builder.graph.edit import variable
from spark_engine.builder.graph.family import FamilyGraph
from spark_engine.builder.plan.buckets import Size
from spark_engine.tensors import DType, TensorSpec
from tests.builder.toy import toy_graph


def test_the_header_orders_steps_before_tables() -> None:
    graph = toy_graph()
    for name in ("prompt_lens", "emit", "slots"):
        graph.inputs.append(variable(TensorSpec(name, DType.I32, ("rows",))))
    total = TensorSpec("total", DType.F32, ("rows", 3))
    family = FamilyGraph("decode", graph, {}, ((total, "slot"),))
    made = header(family, Size("decode", 2), "ort", "cpu")
    assert [s.name for s in made.inputs] == ["slots", "emit", "prompt_lens"]
    assert made.inputs[0].shape == (2,)
    assert [s.name for s in made.states] == ["total"] and made.outputs == ()
    assert made.aliases == {"total.out": "total"}
    assert (made.executor, made.target, made.rows) == ("ort", "cpu", 2)


def test_a_state_that_is_only_read_is_no_alias() -> None:
    graph = toy_graph()
    specs = [TensorSpec(name, DType.F32, ("rows", 3)) for name in ("total", "drafts", "absent")]
    graph.inputs.append(variable(specs[1]))
    family = FamilyGraph("decode", graph, {}, tuple((spec, "slot") for spec in specs))
    made = header(family, Size("decode", 2), "ort", "cpu")
    assert [s.name for s in made.states] == ["total", "drafts"]
    assert made.aliases == {"total.out": "total"}
