"""The seeded cases of mtp_input."""

import numpy as np

from spark_engine.op import Attrs, Case, Inputs, rtol_of
from spark_engine.tensors import Array, DType


def _inputs(rows: int, h: int, dtype: DType, weight: DType, images: bool) -> Inputs:
    vocab = 30

    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        ids = rng.integers(0, vocab, rows)
        ids[rows // 2] = (-1, vocab, 1 << 30)[rows % 3]  # reads row 0
        hidden = 3.0 * rng.standard_normal((rows, h))
        norms = [1.0 + 0.1 * rng.standard_normal(h) for _ in range(2)]
        table = rng.standard_normal((vocab, h)).astype(weight.numpy)
        kept = rng.standard_normal((6, h))
        kept[-1] = np.nan  # scratch
        if images:
            ids[::3] = vocab + np.arange(len(ids[::3])) % 6  # the sixth reads row 0
        return (
            ids.astype(np.int32),
            hidden.astype(dtype.numpy),
            table,
            *(n.astype(np.float32) for n in norms),
            *([kept.astype(dtype.numpy)] if images else []),
        )

    return make


def _case(
    rows: int,
    h: int,
    dtype: DType = DType.F32,
    weight: DType = DType.F32,
    bench: bool = False,
    images: bool = False,
) -> Case:
    attrs: Attrs = {"eps": 1e-6, "dtype": dtype.value}
    label = f"{rows} rows of {h}, {dtype} of {weight}{', images' if images else ''}"
    inputs = _inputs(rows, h, dtype, weight, images)
    return Case(label, attrs, inputs, rtol=rtol_of(dtype), bench=bench)


CASES = (
    _case(1, 64),
    _case(3, 36),
    _case(5, 128, weight=DType.F16),
    _case(8, 256, weight=DType.BF16, bench=True),
    _case(7, 1032, DType.BF16, DType.BF16),
    _case(65, 128, DType.BF16, DType.BF16),
    _case(20, 64, images=True),
    _case(20, 128, DType.BF16, DType.BF16, images=True),
)
