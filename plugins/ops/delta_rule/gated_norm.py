"""Gated RMSNorm of the gated delta net: y = o/sqrt(mean(o²) + eps) · weight · silu(z).

Per head of width Dv, one weight (plain, no +1) for all heads; norm before gate; all in f32
with one cast at the end, as flash-linear-attention and vLLM do. z is in `packed`, a
merged projection, from column `offset` on.
"""

import numpy as np

from spark_engine.named import Named
from spark_engine.op import Attrs, Op
from spark_engine.operand import Result
from spark_engine.plugins.common import fragments as fr
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.kernels.delta_rule import gated_norm_quant_kernels
from spark_engine.plugins.launch import serve
from spark_engine.tensors import Array, DType, TensorSpec


def gates_fit(node: Named) -> str | None:
    """Why `packed` cannot hold z."""
    needed = node.number("offset") + node.dim("K")
    if (columns := node.dim("X")) < needed:
        return f"operand {node['packed'].name} has {columns} columns, expected {needed}"
    return None


def evaluate(attrs: Attrs, o: Array, packed: Array, weight: Array) -> Array:
    """y in float64, cast once to the dtype of `o`."""
    heads, offset = int(attrs["heads"]), int(attrs["offset"])
    wide = o.astype(np.float64).reshape(o.shape[0], heads, -1)
    z = packed[:, offset : offset + o.shape[1]].astype(np.float64).reshape(wide.shape)
    root = np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + float(attrs["eps"]))
    gate = z / (1 + np.exp(-z))
    y: Array = (wide / root * weight.astype(np.float64) * gate).reshape(o.shape).astype(o.dtype)
    return y


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """(o, packed, weight) -> (y,)."""
    return (evaluate(attrs, *arrays),)


def fragment(
    f: Text,
    attrs: Attrs,
    columns: int,
    dtype: DType,
    out: str = "",
    packed: str = "packed",
    weight: str = "weight",
) -> str:
    """y of the values o [tokens, columns], `packed`, `weight`, cast to `dtype`."""
    offset, heads = int(attrs["offset"]), int(attrs["heads"])
    split = [0, heads, columns // heads]
    z = fr.widen(f, fr.columns(f, packed, offset, offset + columns))
    o = f("Reshape", fr.widen(f, "o"), split)
    normed = fr.rms_norm(f, o, weight, columns // heads, float(attrs["eps"]))
    gated = f("Mul", normed, fr.silu(f, f("Reshape", z, split)))
    return f.cast(f("Reshape", gated, [0, columns]), dtype, out)


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """Slice z, normalise per head, scale, gate."""
    f = Text()
    node = OP.named(attrs, specs)
    fragment(f, attrs, node.dim("K"), node["o"].dtype, "y")
    return f.function("gated_norm", ("o", "packed", "weight"), ("y",))


DIMS = {"Dv": "K/heads"}
OPERANDS = (
    operands.x(name="o"),
    operands.x("A[tokens,X]", "z at column `offset`", "packed"),
    operands.weight("weight", "f32[Dv]"),
)
OP = serve(
    Op(
        name="gated_norm",
        operands=OPERANDS,
        results=(Result("y", "A[tokens,K]"),),
        attrs={"eps": None, "heads": None, "offset": None},
        dims=DIMS,
        check=gates_fit,
        reference=reference,
        body=body,
    ),
    gated_norm_quant_kernels.CANDIDATES,
    whole=gated_norm_quant_kernels.alone,
)
