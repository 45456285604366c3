"""FP8 linear with 128×128 weight blocks and activations scaled per token and 128 columns.

y[t,n] = Σ_kb x_scale[t,kb] · w_scale[⌊n/128⌋,kb] · Σ_{k in kb} xq·w (DeepSeek-V3, section 3.3).
N and K need not be multiples of 128. The CPU body dequantises both sides and multiplies once.
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
from spark_engine.plugins.kernels.gemm import linear_fp8_block_kernels
from spark_engine.plugins.launch import serve
from spark_engine.plugins.ops.linear import linear_cases
from spark_engine.tensors import Array, DType, TensorSpec


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """(xq, x_scale, w, w_scale) -> (y,)."""
    xq, x_scale, w, w_scale = arrays
    k = xq.shape[1]
    columns = x_scale.astype(np.float64).repeat(numeric.FP8_BLOCK, axis=1)[:, :k]
    weight = w.astype(np.float64) * numeric.fp8_block_expand(w_scale.astype(np.float32), w.shape)
    y = (xq.astype(np.float64) * columns) @ weight.T
    return (y.astype(activation(attrs).numpy),)


def fragment(f: Text, xq: str, x_scale: str, w: str, w_scale: str, shape: tuple[int, int]) -> str:
    """y, f32, of f32 codes xq [tokens,K] and w [N,K] = `shape`."""
    x = ff.fp8_block_decode(f, xq, x_scale, shape[1])
    return ff.times(f, x, ff.fp8_block_weight(f, w, w_scale, shape))


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """Dequantise both sides, one MatMul."""
    f = Text()
    n, k = OP.named(attrs, specs).shape("N", "K")
    y = fragment(f, fr.widen(f, "xq"), "x_scale", fr.widen(f, "w"), "w_scale", (n, k))
    f.cast(y, activation(attrs), "y")
    return f.function("fp8_block_linear", ("xq", "x_scale", "w", "w_scale"), ("y",))


def _case(m: int, n: int, k: int, dtype: DType = DType.F32, bench: bool = False) -> Case:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        xq, x_scale = numeric.fp8_block_quantise(linear_cases.activations(rng, m, k))
        spread = np.exp(rng.standard_normal((n, k))).astype(np.float32)
        w = random_arrays.normal(rng, n, k, scale=k**-0.5).astype(np.float32) * spread
        return xq, x_scale, *numeric.fp8_block_weight(w)

    return linear_cases.case((m, n, k), make, dtype, bench)


CASES = (
    _case(1, 128, 128),
    _case(3, 37, 200),
    _case(1, 130, 48),
    _case(65, 256, 256, bench=True),
    _case(3, 32, 384, DType.BF16),
    _case(9, 144, 1232),
    _case(33, 16, 2064, DType.BF16),
)

OP = serve(
    Op(
        name="fp8_block_linear",
        operands=(
            operands.x("f8[tokens,K]", name="xq"),
            Operand("x_scale", Role.SCALE, "f32[tokens,⌈K/128⌉]"),
            Operand("w", Role.WEIGHT, "f8[N,K]", joins=1),
            Operand("w_scale", Role.SCALE, "f32[⌈N/128⌉,⌈K/128⌉]", joins=128),
        ),
        results=(Result("y", "A[tokens,N]"),),
        attrs={"dtype": None},
        format="fp8_block",
        legal=LEGAL,
        reference=reference,
        body=body,
        cases=CASES,
    ),
    linear_fp8_block_kernels.CANDIDATES,
    linear_fp8_block_kernels.PACKS,
)
