"""NVFP4 weights and activations (W4A4): y[t,n] = alpha[n] · Σ_k (xq·x_scale)·(w·w_scale).

alpha = input_scale · w_scale2[n], one f32 product made once, when the graph is lowered.
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
from spark_engine.plugins.kernels.gemm import linear_nvfp4_a4_kernels
from spark_engine.plugins.launch import serve
from spark_engine.plugins.ops.linear import linear_cases, nvfp4_linear
from spark_engine.tensors import Array, DType, TensorSpec

OPERANDS = (
    operands.x("u8[tokens,K/2]", name="xq"),
    Operand("x_scale", Role.SCALE, "f8[tokens,K/16]"),
    Operand("w", Role.WEIGHT, "u8[N,K/2]", joins=1),
    Operand("w_scale", Role.SCALE, "f8[N,K/16]", joins=1),
    Operand("alpha", Role.SCALE, "f32[N]", joins=1),
)
NAMES = tuple(o.name for o in OPERANDS)


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """(xq, x_scale, w, w_scale, alpha) -> (y,)."""
    xq, x_scale, w, w_scale, alpha = arrays
    x = numeric.nvfp4_decode(xq.astype(np.uint8), x_scale).astype(np.float64)
    weight = numeric.nvfp4_decode(w.astype(np.uint8), w_scale).astype(np.float64)
    y = x @ weight.T * alpha.astype(np.float64)
    return (y.astype(activation(attrs).numpy),)


def fragment(f: Text, x: tuple[str, str], w: tuple[str, str], alpha: str, k: int) -> str:
    """y, f32, of (packed u8, f32 block scales) of both sides."""
    return nvfp4_linear.fragment(f, ff.nvfp4_decode(f, *x, k), *w, alpha, k)


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """Dequantise both sides, one MatMul, a scale per column."""
    f = Text()
    k = OP.named(attrs, specs).dim("K")
    x, w = ("xq", fr.widen(f, "x_scale")), ("w", fr.widen(f, "w_scale"))
    f.cast(fragment(f, x, w, "alpha", k), activation(attrs), "y")
    return f.function("nvfp4_linear_a4", NAMES, ("y",))


def _case(m: int, n: int, k: int, dtype: DType = DType.F32, bench: bool = False) -> Case:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x = random_arrays.normal(rng, m, k).astype(np.float32)
        if m > 2:
            x[1] = 0
        input_scale = np.float32(np.abs(x).max() / 2688)
        w, w_scale, w_scale2 = nvfp4_linear.weight(rng, n, k)
        xq, x_scale = numeric.nvfp4_quantise(x, input_scale)
        if m > 2:
            xq[2], x_scale[2] = 0x7B, np.nan
        return xq, x_scale, w, w_scale, w_scale2.astype(np.float32) * input_scale

    return linear_cases.case((m, n, k), make, dtype, bench, slack=1.0)


CASES = (
    _case(1, 64, 64),
    _case(3, 37, 48),
    _case(65, 96, 256, bench=True),
    _case(3, 32, 80, DType.BF16),
    _case(9, 144, 624),
    _case(33, 16, 1088, DType.BF16),
    _case(130, 272, 768),
)

OP = serve(
    Op(
        name="nvfp4_linear_a4",
        operands=OPERANDS,
        results=(Result("y", "A[tokens,N]"),),
        attrs={"dtype": None},
        format="nvfp4_a4",
        legal=LEGAL,
        reference=reference,
        body=body,
        cases=CASES,
    ),
    linear_nvfp4_a4_kernels.CANDIDATES,
    linear_nvfp4_a4_kernels.PACKS,
)
