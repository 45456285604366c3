"""RMSNorm: y = x · weight / sqrt(mean(x²) + eps), over the last axis.

Computed in f32 with one cast at the end (Zhang & Sennrich, 2019). The weights of Qwen3.5's
zero-centred norms already include their + 1.
"""

import numpy as np

from spark_engine.op import Attrs, Op
from spark_engine.operand import Result
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.fragments import rms_norm, widen
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.kernels.rowwise import norm_quant_kernels
from spark_engine.plugins.launch import serve
from spark_engine.tensors import Array, TensorSpec


def normalise(x: Array, weight: Array, eps: float) -> Array:
    """The formula in float64, cast once to the dtype of `x`."""
    wide = x.astype(np.float64)
    root = np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + eps)
    y: Array = (wide / root * weight.astype(np.float64)).astype(x.dtype)
    return y


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """(x, weight) -> (y,)."""
    x, weight = arrays
    return (normalise(x, weight, float(attrs["eps"])),)


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """Cast, normalise, scale, cast."""
    f = Text()
    node = OP.named(attrs, specs)
    y = rms_norm(f, widen(f, "x"), "weight", node.dim("K"), float(attrs["eps"]))
    f.cast(y, node["x"].dtype, out="y")
    return f.function("rms_norm", ("x", "weight"), ("y",))


OP = serve(
    Op(
        name="rms_norm",
        operands=(operands.x(), operands.weight("weight", "f32[K]")),
        results=(Result("y", "A[tokens,K]"),),
        attrs={"eps": None},
        reference=reference,
        body=body,
    ),
    norm_quant_kernels.CANDIDATES,
    whole=norm_quant_kernels.alone,
)
