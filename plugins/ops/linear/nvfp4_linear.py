"""NVFP4 weights, unquantised activations (W4A16): y[t,n] = w_scale2[n] · Σ_k x · (code·w_scale).

code·w_scale is exact in bf16 and f32; the global scale comes once at the end, per output
column so that merged projections keep their own (TensorRT Model Optimizer's W4A16_NVFP4).
"""

from __future__ import annotations

import numpy as np

from spark_engine.op import Attrs, Case, Op, rtol_of
from spark_engine.operand import Operand, Result, Role
from spark_engine.plugins.common import fragments as fr
from spark_engine.plugins.common import operands, random_arrays
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.shapes import LEGAL, activation
from spark_engine.plugins.formats import format_fragments as ff
from spark_engine.plugins.formats import numeric
from spark_engine.plugins.kernels.gemm import linear_nvfp4_kernels
from spark_engine.plugins.launch import serve
from spark_engine.tensors import Array, DType, TensorSpec


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """(x, w, w_scale, w_scale2) -> (y,)."""
    x, w, w_scale, w_scale2 = arrays
    weight = numeric.nvfp4_decode(w.astype(np.uint8), w_scale).astype(np.float64)
    y = x.astype(np.float64) @ weight.T * w_scale2.astype(np.float64)
    return (y.astype(activation(attrs).numpy),)


def fragment(f: Text, x: str, w: str, w_scale: str, w_scale2: str, k: int) -> str:
    """y, f32, of f32 x [tokens,k], u8 w, f32 w_scale, f32 w_scale2."""
    return f("Mul", ff.times(f, x, ff.nvfp4_decode(f, w, w_scale, k)), w_scale2)


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """Dequantise the weight (folded at load), one MatMul, a scale per column."""
    f = Text()
    k = OP.named(attrs, specs).dim("K")
    y = fragment(f, fr.widen(f, "x"), "w", fr.widen(f, "w_scale"), "w_scale2", k)
    f.cast(y, activation(attrs), "y")
    return f.function("nvfp4_linear", ("x", "w", "w_scale", "w_scale2"), ("y",))


def weight(rng: np.random.Generator, n: int, k: int) -> tuple[Array, ...]:
    """(w, w_scale, w_scale2 f32[n]) of a random weight with a block of zeros."""
    dense = random_arrays.normal(rng, n, k, scale=k**-0.5).astype(np.float32)
    dense[n // 2, :16] = 0
    packed, scale, scale2 = numeric.nvfp4_weight(dense)
    return packed, scale, scale2 * random_arrays.positive(rng, n)


def _case(m: int, n: int, k: int, dtype: DType = DType.F32, bench: bool = False) -> Case:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x = random_arrays.normal(rng, m, k, dtype=dtype)
        if m > 2:
            x[1], x[2] = 0, np.nan
        return x, *weight(rng, n, k)

    rtol = rtol_of(dtype)
    label = f"{m}x{n}x{k} {dtype}"
    return Case(label, {"dtype": dtype.value}, make, rtol=rtol, atol=rtol, bench=bench)


CASES = (
    _case(1, 64, 64),
    _case(3, 37, 48),
    _case(65, 96, 256, bench=True),
    _case(1, 33, 16),
    _case(3, 32, 80, DType.BF16, bench=True),
)

OP = serve(
    Op(
        name="nvfp4_linear",
        operands=(
            operands.x(note="W4A16"),
            Operand("w", Role.WEIGHT, "u8[N,K/2]", joins=1),
            Operand("w_scale", Role.SCALE, "f8[N,K/16]", joins=1),
            Operand("w_scale2", Role.SCALE, "f32[N]", joins=1),
        ),
        results=(Result("y", "A[tokens,N]"),),
        attrs={"dtype": None},
        format="nvfp4",
        legal=LEGAL,
        reference=reference,
        body=body,
        cases=CASES,
    ),
    linear_nvfp4_kernels.CANDIDATES,
    linear_nvfp4_kernels.PACKS,
)
