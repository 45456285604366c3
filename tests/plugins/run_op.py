"""Runs one op over named operands, or a few nodes, on onnxruntime. Knows no op."""

from collections.abc import Mapping, Sequence
from typing import Any

from spark_engine.op import Attrs, Op
from spark_engine.operand import Operand, Result, Role
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.tensors import Array, TensorSpec
from tests.inferring_op import InferringOp
from tests.plugins import one_node


def run(op: Op, attrs: Attrs, operands: Mapping[str, Array], threads: int = 1) -> list[Array]:
    """The op's outputs in order; weights become initializers."""
    return run_named(op, attrs, operands, [r.name for r in op.made(attrs)], threads)


def run_named(
    op: Op, attrs: Attrs, operands: Mapping[str, Array], outputs: Sequence[str], threads: int = 1
) -> list[Array]:
    """The same for an op that has as many outputs as `outputs` names."""
    names = [f"out_{o}" for o in outputs]
    fixed = [o.name for o in op.given(attrs) if o.constant and o.name in operands]
    node = one_node.Node(op, list(operands), names, attrs)
    results = one_node.run_graph([node], dict(operands), names, fixed, threads)
    return [results[n] for n in names]


def named(op: Op, arrays: Sequence[Array], attrs: Attrs | None = None) -> dict[str, Array]:
    """The arrays by operand name, of a node with these attributes."""
    return dict(zip(op.names(attrs or {}, len(arrays)), arrays, strict=True))


def run_nodes(build: Any, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> list[Array]:
    """Runs nodes that `build(text)` appends; `outputs` gives examples of name, dtype, shape."""

    def infer(_: Attrs, __: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        return tuple(one_node.spec_of(n, a) for n, a in outputs.items())

    def body(_: Attrs, __: tuple[TensorSpec, ...]) -> str:
        f = Text()
        build(f)
        return f.function("probe", list(inputs), list(outputs))

    def reference(_: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        return arrays

    given = tuple(Operand(n, Role.ACTIVATION, "A") for n in inputs)
    made = tuple(Result(n) for n in outputs)
    op = InferringOp("probe", given, made, {}, reference, body, (), results_of=infer)
    return run(op, {}, inputs)
