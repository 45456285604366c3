"""LayerNorm: y = (x − mean(x)) / sqrt(var(x) + eps) · weight + bias, over the last axis.

Computed in f32 with one cast at the end (Ba et al., 2016). With `group` the normed rows of so many
tokens become one row, side by side: a merger's input.
"""

import numpy as np

from spark_engine.errors import GraphError
from spark_engine.named import Named
from spark_engine.op import Attrs, Op
from spark_engine.operand import Result
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.fragments import normalise, row_sum, widen
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.kernels.vision.layer_norm_kernels import CANDIDATES
from spark_engine.plugins.launch import serve
from spark_engine.tensors import Array, Dim, TensorSpec


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
    ),
    CANDIDATES,
)
