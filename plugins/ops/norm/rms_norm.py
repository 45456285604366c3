"""RMSNorm: y = x · weight / sqrt(mean(x²) + eps), over the last axis.

Computed in f32 with one cast at the end (Zhang & Sennrich, 2019). The weights of Qwen3.5's
zero-centred norms already include their + 1.
"""

import numpy as np

from spark_engine.op import Attrs, Case, Inputs, Op
from spark_engine.operand import Result
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.fragments import rms_norm, widen
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.kernels.rowwise import norm_quant_kernels
from spark_engine.plugins.launch import serve
from spark_engine.tensors import Array, DType, TensorSpec


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


def _inputs(rows: int, width: int, dtype: DType = DType.F32, scale: float = 1.0) -> Inputs:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x = rng.standard_normal((rows, width)) * scale
        x[rows // 2] = 0.0  # a row of zeros divides by sqrt(eps), not by zero
        weight = 1.0 + 0.1 * rng.standard_normal(width)
        return x.astype(dtype.numpy), weight.astype(np.float32)

    return make


CASES = (
    Case("one row", {"eps": 1e-6}, _inputs(1, 64)),
    Case("odd width", {"eps": 1e-6}, _inputs(3, 37)),
    Case("many rows", {"eps": 1e-6}, _inputs(65, 256), bench=True),
    Case("tiny values", {"eps": 1e-6}, _inputs(3, 64, scale=1e-5)),
    Case("huge values", {"eps": 1e-5}, _inputs(3, 64, scale=1e8)),
    Case("bf16", {"eps": 1e-6}, _inputs(5, 128, DType.BF16), rtol=1e-2),
)

OP = serve(
    Op(
        name="rms_norm",
        operands=(operands.x(), operands.weight("weight", "f32[K]")),
        results=(Result("y", "A[tokens,K]"),),
        attrs={"eps": None},
        reference=reference,
        body=body,
        cases=CASES,
    ),
    norm_quant_kernels.CANDIDATES,
    whole=norm_quant_kernels.alone,
)
