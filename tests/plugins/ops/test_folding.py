"""Dequantisation of weights costs nothing per step: onnxruntime folds it at load."""

from pathlib import Path

import onnx
import pytest

from spark_engine.plugins import registry
from tests.plugins.cases.seeded import arrays_of, seeded
from tests.plugins.one_node import Node, build, constants

# What is left of a body when its weights are constants, but for casts: those to the same dtype
# vanish inside a model and stay at its edge.
LEFT = {"linear": ["Gemm"], "fp8_linear": ["Gemm", "Mul"], "nvfp4_linear": ["Gemm", "Mul"]}


ALL = (*LEFT, "fp8_block_linear", "nvfp4_linear_a4", "moe_router", "shared_gate", "grouped_moe")


def folded(name: str, case: int, path: Path) -> onnx.ModelProto:
    """The model onnxruntime really runs for an op's case."""
    op = registry.get(name)
    arrays = arrays_of(op, seeded(op)[case])
    attrs = seeded(op)[case].attrs
    names = op.names(attrs, len(arrays))
    outs = [f"out{i}" for i in range(len(op.outputs))]
    constant = [n for n in constants(op, attrs) if n in names]
    node = Node(op, names, outs, attrs)
    values = dict(zip(names, arrays, strict=True))
    build([node], values, outs, constant, dump=path)
    return onnx.load(path)


@pytest.mark.parametrize("name", LEFT)
def test_one_product_is_left(name: str, tmp_path: Path) -> None:
    model = folded(name, 0, tmp_path / "folded.onnx")
    assert [n.op_type for n in model.graph.node if n.op_type != "Cast"] == LEFT[name]


@pytest.mark.parametrize("name", ALL)
def test_every_product_has_a_constant_matrix(name: str, tmp_path: Path) -> None:
    """A right operand that is computed or 3-D would make a row's bits depend on the others."""
    for case in range(len(seeded(registry.get(name)))):
        model = folded(name, case, tmp_path / f"{case}.onnx")
        constants = {i.name: len(i.dims) for i in model.graph.initializer}
        rights = [n.input[1] for n in model.graph.node if n.op_type in ("Gemm", "MatMul")]
        assert rights and all(constants.get(r) == 2 for r in rights)
