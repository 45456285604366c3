"""FP8 W8A8 linear with static scales: y[t,n] = (Σ_k xq·w) · (x_scale · w_scale[n]).

Codes multiply and accumulate in f32, the scales come once at the end (TensorRT Model
Optimizer's FP8). w_scale is per output column, so that merged projections keep their own.
"""

from __future__ import annotations

import numpy as np

from spark_engine.op import Attrs, Case, Op
from spark_engine.operand import Operand, Result, Role
from spark_engine.plugins.common import fragments as fr
from spark_engine.plugins.common import operands, random_arrays
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.shapes import LEGAL, activation
from spark_engine.plugins.formats import format_fragments as ff
from spark_engine.plugins.formats import numeric
from spark_engine.plugins.kernels.gemm import linear_fp8_kernels
from spark_engine.plugins.launch import serve
from spark_engine.plugins.ops.linear import linear_cases
from spark_engine.tensors import Array, DType, TensorSpec


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """(xq, w, x_scale, w_scale) -> (y,)."""
    xq, w, x_scale, w_scale = (a.astype(np.float64) for a in arrays)
    return ((xq @ w.T * (x_scale * w_scale)).astype(activation(attrs).numpy),)


def fragment(f: Text, xq: str, w: str, x_scale: str, w_scale: str) -> str:
    """y, f32, of f32 codes xq [tokens,K] and w [N,K]."""
    return f("Mul", ff.times(f, xq, w), f("Mul", x_scale, w_scale))


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """One MatMul of widened codes and a scale per column."""
    f = Text()
    y = fragment(f, fr.widen(f, "xq"), fr.widen(f, "w"), "x_scale", "w_scale")
    f.cast(y, activation(attrs), "y")
    return f.function("fp8_linear", ("xq", "w", "x_scale", "w_scale"), ("y",))


def _case(m: int, n: int, k: int, dtype: DType = DType.F32, bench: bool = False) -> Case:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x_scale = random_arrays.positive(rng, low=0.005, high=0.01)
        w_scale = random_arrays.positive(rng, n, low=0.0005, high=0.001)
        xq = numeric.e4m3(linear_cases.activations(rng, m, k, scale=100.0))
        w = numeric.e4m3(random_arrays.normal(rng, n, k, scale=200.0).astype(np.float32))
        return xq, w, x_scale, w_scale

    return linear_cases.case((m, n, k), make, dtype, bench)


CASES = (
    _case(1, 64, 48),
    _case(3, 37, 35),
    _case(65, 96, 256, bench=True),
    _case(3, 32, 64, DType.BF16),
)

OP = serve(
    Op(
        name="fp8_linear",
        operands=(
            operands.x("f8[tokens,K]", name="xq"),
            Operand("w", Role.WEIGHT, "f8[N,K]", joins=1),
            Operand("x_scale", Role.SCALE, "f32[]"),
            Operand("w_scale", Role.SCALE, "f32[N]", joins=1),
        ),
        results=(Result("y", "A[tokens,N]"),),
        attrs={"dtype": None},
        format="fp8",
        legal=LEGAL,
        reference=reference,
        body=body,
        cases=CASES,
    ),
    linear_fp8_kernels.CANDIDATES,
    linear_fp8_kernels.PACKS,
)
