"""LayerNorm: y = (x − mean(x)) / sqrt(var(x) + eps) · weight + bias, over the last axis.

Computed in f32 with one cast at the end (Ba et al., 2016). With `group` the normed rows of so many
tokens become one row, side by side: a merger's input.
"""

import numpy as np

from spark_engine.errors import GraphError
from spark_engine.named import Named
from spark_engine.op import Attrs, Case, Inputs, Op, rtol_of
from spark_engine.operand import Result
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.fragments import normalise, row_sum, widen
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.kernels.vision.layer_norm_kernels import CANDIDATES
from spark_engine.plugins.launch import serve
from spark_engine.tensors import Array, Dim, DType, TensorSpec


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """(x, weight, bias) -> (y,)."""
    x, weight, bias = (a.astype(np.float64) for a in arrays)
    apart = x - x.mean(-1, keepdims=True)
    root = np.sqrt(np.mean(apart * apart, axis=-1, keepdims=True) + float(attrs["eps"]))
    y = (apart / root * weight + bias).astype(arrays[0].dtype)
    return (y.reshape(-1, y.shape[1] * int(attrs.get("group", 1))),)


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """Cast, subtract the mean, normalise, scale, shift, cast."""
    f, node = Text(), OP.named(attrs, specs)
    x, width = widen(f, "x"), node.dim("K")
    apart = f("Sub", x, f("Div", row_sum(f, x, width), float(width)))
    y = f("Mul", normalise(f, apart, width, node.real("eps")), "weight")
    y = f.cast(f("Add", y, "bias"), node["x"].dtype)
    f("Reshape", y, [-1, width * node.number("group")], out="y")
    return f.function("layer_norm", OP.inputs, OP.outputs)


def _grouped(node: Named) -> Dim:
    """Rows of the result: of a graph's patches they are its rows."""
    tokens, group = node["x"].shape[0], node.number("group")
    if isinstance(tokens, str):
        return tokens if group == 1 else "rows"
    if tokens % group:
        raise GraphError(f"layer_norm: {tokens} tokens are no groups of {group}")
    return tokens // group


def _inputs(rows: int, width: int, dtype: DType = DType.F32) -> Inputs:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x = rng.standard_normal((rows, width)) * 2 + 3
        x[rows // 2] = 1.5  # a row without variance divides by sqrt(eps)
        weight, bias = 1 + 0.1 * rng.standard_normal(width), rng.standard_normal(width)
        return x.astype(dtype.numpy), weight.astype(np.float32), bias.astype(np.float32)

    return make


def _case(label: str, rows: int, width: int, group: int = 1, dtype: DType = DType.F32) -> Case:
    rtol, attrs = rtol_of(dtype), {"eps": 1e-6, "group": group}
    return Case(label, attrs, _inputs(rows, width, dtype), rtol, rtol, bench=rows == 65)


OP = serve(
    Op(
        name="layer_norm",
        operands=(
            operands.x(),
            operands.weight("weight", "f32[K]"),
            operands.weight("bias", "f32[K]"),
        ),
        results=(Result("y", "A[grouped,group·K]"),),
        attrs={"eps": None, "group": 1},
        dims={"grouped": _grouped},
        reference=reference,
        body=body,
        cases=(
            _case("one row", 1, 64),
            _case("odd width", 3, 37),
            _case("many rows", 65, 256),
            _case("bf16", 5, 128, dtype=DType.BF16),
            _case("groups", 12, 72, 4),
            _case("groups bf16", 8, 64, 4, DType.BF16),
        ),
    ),
    CANDIDATES,
)
