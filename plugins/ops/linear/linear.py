"""An unquantised linear layer: y = x · wᵀ, accumulated in f32, cast once.

The weight keeps the checkpoint's dtype; the CPU body widens it to f32 at load.
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
from spark_engine.plugins.kernels.gemm import linear_bf16_kernels
from spark_engine.plugins.launch import serve
from spark_engine.tensors import Array, DType, TensorSpec


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """(x, w) -> (y,)."""
    x, w = (a.astype(np.float64) for a in arrays)
    return ((x @ w.T).astype(activation(attrs).numpy),)


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """One MatMul."""
    f = Text()
    y = ff.times(f, fr.widen(f, "x"), fr.widen(f, "w"))
    f.cast(y, activation(attrs), "y")
    return f.function("linear", ("x", "w"), ("y",))


def _case(
    m: int, n: int, k: int, weight: DType, dtype: DType = DType.F32, bench: bool = False
) -> Case:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x = random_arrays.normal(rng, m, k, dtype=dtype)
        if m > 2:
            x[1], x[2] = 0, np.nan  # the NaN row must poison itself and no other
        return x, random_arrays.normal(rng, n, k, scale=k**-0.5, dtype=weight)

    rtol = rtol_of(dtype)
    label = f"{m}x{n}x{k} {weight} {dtype}"
    return Case(label, {"dtype": dtype.value}, make, rtol=rtol, atol=rtol, bench=bench)


CASES = (
    _case(1, 64, 48, DType.F32),
    _case(3, 37, 33, DType.F16),
    _case(65, 96, 256, DType.BF16, bench=True),
    _case(1, 5, 256, DType.BF16, DType.BF16, bench=True),
    _case(3, 32, 64, DType.BF16, DType.BF16),
)

OP = serve(
    Op(
        name="linear",
        operands=(operands.x(), Operand("w", Role.WEIGHT, "W[N,K]", joins=1)),
        results=(Result("y", "A[tokens,N]"),),
        attrs={"dtype": None},
        format="dense",
        legal=LEGAL,
        reference=reference,
        body=body,
        cases=CASES,
    ),
    linear_bf16_kernels.CANDIDATES,
    linear_bf16_kernels.PACKS,
)
