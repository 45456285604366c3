"""Packed weights: one for each layout of a weight that a node reads, and no others."""

from dataclasses import replace

import numpy as np
import onnx_graphsurgeon as gs
import pytest

from spark_engine.builder.graph import graph_checks
from spark_engine.builder.graph.edit import variable
from spark_engine.builder.graph.family import FamilyGraph
from spark_engine.builder.graph.graph_checks import Subject
from spark_engine.builder.graph.nodes import Ops, spec_of
from spark_engine.builder.graph.packing import Packing, pack
from spark_engine.errors import GraphError
from spark_engine.interface import Limits
from spark_engine.kernel import Attrs, Cuda, Pack
from spark_engine.models.weights import recipes
from spark_engine.op import Op
from spark_engine.tensors import Array, DType, TensorSpec
from tests.builder import toy

W = TensorSpec("w", DType.F32, (2, 3))


def _scaled(attrs: Attrs, array: Array) -> Array:
    return array * np.float32(attrs["by"])


def packing_op(name: str) -> Op:
    """An op of x, w and perhaps a bias; w and bias are packed by an attribute."""
    same = Pack(lambda attrs, spec: spec, _scaled, attrs=("by",))
    made = toy._op(
        name, ("x", "w", "bias"), "y = Add(x, w)", cuda=Cuda(packs={"w": same, "bias": same})
    )
    return replace(made, attrs={"by": 2, "keep": 0})


OPS: dict[str, Op] = {name: packing_op(name) for name in ("one", "two")}
_WIDER = Pack(
    lambda attrs, spec: replace(spec, shape=(spec.shape[0] + 2, *spec.shape[1:])),
    _scaled,
    attrs=("by",),
)
OPS["wide"] = replace(packing_op("wide"), cuda=Cuda(packs={"w": _WIDER}))


def lowered(*calls: tuple[str, int], plain: bool = False) -> FamilyGraph:
    """Nodes of these ops and attributes over one weight; `plain`: an Add reads it too."""
    x, w = variable(TensorSpec("x", DType.F32, (2, 3))), variable(W)
    nodes, outs = [], []
    for i, (op, by) in enumerate(calls):
        outs.append(variable(TensorSpec(f"y{i}", DType.F32, (2, 3))))
        nodes.append(gs.Node(op, f"y{i}", {"by": by}, [x, w], [outs[-1]], domain="spark"))
    if plain:
        outs.append(variable(TensorSpec("z", DType.F32, (2, 3))))
        nodes.append(gs.Node("Add", "z", {}, [x, w], [outs[-1]]))
    recipe = recipes.source("w", DType.F32, (2, 3))
    graph = gs.Graph(nodes, [x, w], outs, opset=23)
    return FamilyGraph("decode", graph, {"w": recipes.weight("w", recipe)}, ())


class Store:
    def read(self, name: str) -> Array:
        return np.arange(6, dtype=np.float32).reshape(2, 3)


def test_one_packed_weight_for_equal_nodes_and_the_original_goes() -> None:
    """The nodes have no third operand: what is packed there when it is given is left out."""
    made = lowered(("one", 3), ("one", 3))
    pack(made, OPS)
    assert [t.name for t in made.graph.inputs] == ["x", "w:one"] and list(made.weights) == ["w:one"]
    value = made.weights["w:one"].evaluate(Store())
    np.testing.assert_array_equal(value, 3 * Store().read("w"))


def test_every_op_has_its_own_and_a_plain_reader_keeps_the_original() -> None:
    made = lowered(("one", 3), ("two", 5), plain=True)
    pack(made, OPS)
    assert sorted(made.weights) == ["w", "w:one", "w:two"]
    first, second, add = made.graph.nodes
    assert [n.inputs[1].name for n in (first, second, add)] == ["w:one", "w:two", "w"]
    np.testing.assert_array_equal(made.weights["w:two"].evaluate(Store())[1], [15, 20, 25])


def test_packings_are_equal_by_op_operand_and_attributes() -> None:
    same = [Packing(OPS["one"], "w", (("by", 3),)) for _ in range(2)]
    others = [
        Packing(OPS["one"], "w", (("by", 4),)),
        Packing(OPS["one"], "bias", (("by", 3),)),
        Packing(OPS["two"], "w", (("by", 3),)),
    ]
    assert same[0] == same[1] and hash(same[0]) == hash(same[1])
    assert all(other != same[0] for other in others) and same[0] != "one"


def test_nodes_share_a_weight_unless_the_pack_reads_what_differs() -> None:
    """In one graph and in two; so do ops with packs of one name."""
    like = replace(OPS["two"].cuda.packs["w"], op="one")
    ops = OPS | {"two": replace(OPS["two"], cuda=Cuda(packs={"w": like}))}
    made, other = lowered(("one", 3), ("two", 3)), lowered(("two", 3))
    made.graph.nodes[1].attrs["keep"] = 1
    for family in (made, other):
        pack(family, ops)
    assert list(made.weights) == ["w:one"] and made.weights == other.weights
    assert complaints(made, ops) == complaints(other, ops) == []


def test_an_operand_that_is_no_weight_is_our_bug() -> None:
    made = lowered(("one", 3))
    made.weights.clear()
    with pytest.raises(GraphError, match="y0: packed operand w is no weight"):
        pack(made, OPS)


def complaints(made: FamilyGraph, ops: Ops = OPS) -> list[str]:
    """Of a packed graph: what its weights' layouts and its nodes' shapes are found to be."""
    subject = Subject.of(made, Limits(1, 64, 1, 5), ops)
    return [*graph_checks.layouts(subject), *graph_checks.inference(subject)]


def test_a_packed_graph_is_verified_by_what_was_packed() -> None:
    made = lowered(("wide", 3), ("one", 3), plain=True)
    assert [c.split(", ")[1] for c in complaints(made)] == ["which is not packed"] * 2
    pack(made, OPS)
    assert spec_of(made.graph.inputs[-2]).shape == (4, 3)  # inference looks through the packing
    assert complaints(made) == []
    wide, one, add = made.graph.nodes
    one.inputs[1], add.inputs[1] = wide.inputs[1], one.inputs[1]
    (found,) = (c for c in complaints(made) if "another operand" in c)
    assert found.startswith("one y1 reads w:wide")


def test_a_packed_weight_of_another_shape_is_seen() -> None:
    made = lowered(("wide", 3))
    pack(made, OPS)
    made.graph.nodes[0].inputs[1].shape = [3, 3]
    assert complaints(made) == ["w:wide is w:wide f32[3, 3], packed w:wide f32[4, 3]"]
