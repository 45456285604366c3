"""A tiny graph over two small ops, for tests that need a graph and no network."""

from collections.abc import Callable
from typing import Any

import onnx_graphsurgeon as gs

from spark_engine.builder.graph.edit import variable
from spark_engine.op import Attrs, Op
from spark_engine.operand import Operand, Result, Role
from spark_engine.tensors import Array, DType, TensorSpec
from tests.inferring_op import InferringOp


def _first(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    return (TensorSpec("y", specs[-1].dtype, specs[-1].shape),)


def _op(name: str, inputs: tuple[str, ...], text: str, **rest: Any) -> Op:
    def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        raise AssertionError("not called")

    head = f'<domain: "spark", opset_import: ["" : 23]>\n{name}'
    call = f"({', '.join(inputs)}) => (y) {{{text}}}"
    body: Callable[[Attrs, tuple[TensorSpec, ...]], str] = lambda a, s: f"{head} {call}"  # noqa: E731
    state = "state" if "state" in inputs else ""
    operands = tuple(Operand(n, Role.STATE if n == state else Role.ACTIVATION, "A") for n in inputs)
    results = (Result("y", updates=state),)
    return InferringOp(name, operands, results, {}, reference, body, (), results_of=_first, **rest)


OPS = {
    "double": _op("double", ("x",), "y = Add(x, x)"),
    "accumulate": _op("accumulate", ("x", "state"), "y = Add(x, state)"),
    "round": _op("round", ("x",), "y = Floor(x)", quantises="whole"),
}


def toy_graph() -> gs.Graph:
    """x -> double -> h; h + w -> sum; total.out = accumulate(sum, total)."""
    x = variable(TensorSpec("x", DType.F32, ("rows", 3)))
    w = variable(TensorSpec("w", DType.F32, ("rows", 3)))
    total = variable(TensorSpec("total", DType.F32, ("rows", 3)))
    h, summed, out = (
        variable(TensorSpec(n, DType.F32, ("rows", 3))) for n in ("h", "sum.out", "total.out")
    )
    nodes = [
        gs.Node("double", name="h", inputs=[x], outputs=[h], domain="spark"),
        gs.Node("Add", name="sum.out", inputs=[h, w], outputs=[summed]),
        gs.Node("accumulate", name="last", inputs=[summed, total], outputs=[out], domain="spark"),
    ]
    return gs.Graph(nodes, [x, w, total], [out], opset=23)
