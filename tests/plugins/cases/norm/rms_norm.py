"""The seeded cases of rms_norm."""

import numpy as np

from spark_engine.op import Case, Inputs
from spark_engine.tensors import Array, DType


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
