"""The rules make every fused op of the chain that it declares in `fuses`."""

import numpy as np
import onnx_graphsurgeon as gs
import pytest

from spark_engine.builder.graph.edit import add_node, variable
from spark_engine.builder.graph.nodes import attrs_of
from spark_engine.builder.graph.rewrite import RewriteContext, rewrite
from spark_engine.builder.rules import RULES
from spark_engine.models.weights import recipes as weights
from spark_engine.op import Case, Op, Part
from spark_engine.plugins.registry import OPS, REGISTRY
from spark_engine.tensors import Array, DType, TensorSpec
from tests.plugins.cases.seeded import seeded

CASES = [
    pytest.param(op, case, id=f"{op.name}-{case.label}")
    for op in OPS
    if op.fuses is not None
    for case in seeded(op)
]


class NoCheckpoint:
    """Nothing is to be read: no two scales are compared."""

    def read(self, name: str) -> Array:
        raise AssertionError(name)


class Chain:
    """The unfused graph of one case, as a lowered network has it."""

    def __init__(self, op: Op, case: Case) -> None:
        assert op.fuses is not None
        self.context = RewriteContext(gs.Graph(opset=23), {}, NoCheckpoint(), REGISTRY)
        self.tensors: dict[str, gs.Tensor] = {}
        arrays = case.inputs(np.random.default_rng(0))
        for operand, array in zip(op.given(case.attrs), arrays, strict=False):
            spec = TensorSpec(operand.name, DType.of(array.dtype), array.shape)
            if operand.name == "scales":
                for i in range(array.shape[0]):
                    self._weight(TensorSpec(f"scales[{i}]", spec.dtype, ()))
            elif operand.constant:
                self._weight(spec)
            else:
                self._input(variable(spec))
        chain = op.fuses(case.attrs)
        for part in chain.parts:
            self._node(part)
        self.context.graph.outputs = [self.tensors[name] for name in chain.results]

    def _input(self, tensor: gs.Tensor) -> None:
        self.tensors[tensor.name] = tensor
        self.context.graph.inputs.append(tensor)

    def _weight(self, spec: TensorSpec) -> None:
        source = weights.source(spec.name, spec.dtype, spec.dims)
        self.context.weights[spec.name] = weights.weight(spec.name, source)
        self._input(variable(self.context.weights[spec.name].spec))

    def _node(self, part: Part) -> None:
        inputs = [self.tensors[name] for name in part.inputs]
        if part.op in REGISTRY:
            outputs = list(part.outputs)
            node = add_node(REGISTRY, outputs[0], part.op, inputs, outputs, **part.attrs)
        else:
            first = inputs[0]
            out = gs.Variable(part.outputs[0], first.dtype, first.shape)
            node = gs.Node(part.op, out.name, dict(part.attrs), inputs, [out])
        self.context.graph.nodes.append(node)
        self.tensors |= {t.name: t for t in node.outputs}


@pytest.mark.parametrize(("op", "case"), CASES)
def test_the_rules_make_it_of_its_parts(op: Op, case: Case) -> None:
    chain = Chain(op, case)
    results = [t.name for t in chain.context.graph.outputs]
    rewrite(chain.context, RULES)
    (node,) = chain.context.graph.nodes
    assert node.op == op.name and op.fuses is not None
    assert op.fuses(attrs_of(node, op)) == op.fuses(case.attrs)
    want = [n for n in op.names(case.attrs, 99) if n != "scales"]
    assert {t.name for t in node.inputs[: len(want)]} == set(want)
    assert [t.name for t in node.outputs] == results
    outputs = [_spec(t) for t in node.outputs]
    made = op.infer(attrs_of(node, op), tuple(map(_spec, node.inputs)))
    assert [(m.dtype, m.shape) for m in made] == [(o.dtype, o.shape) for o in outputs]


def _spec(tensor: gs.Tensor) -> TensorSpec:
    return TensorSpec(tensor.name, DType.of(tensor.dtype), tuple(tensor.shape))
