"""The seeded cases of layer_norm."""

import numpy as np

from spark_engine.op import Case, Inputs, rtol_of
from spark_engine.tensors import Array, DType


def _inputs(rows: int, width: int, dtype: DType = DType.F32) -> Inputs:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x = rng.standard_normal((rows, width)) * 2 + 3
        x[rows // 2] = 1.5  # a row without variance divides by sqrt(eps)
        weight, bias = 1 + 0.1 * rng.standard_normal(width), rng.standard_normal(width)
        return x.astype(dtype.numpy), weight.astype(np.float32), bias.astype(np.float32)

    return make


def _case(label: str, rows: int, width: int, group: int = 1, dtype: DType = DType.F32) -> Case:
    rtol, attrs = rtol_of(dtype), {"eps": 1e-6, "group": group}
    return Case(label, attrs, _inputs(rows, width, dtype), rtol, rtol, bench=rows == 65)


CASES = (
    _case("one row", 1, 64),
    _case("odd width", 3, 37),
    _case("many rows", 65, 256),
    _case("bf16", 5, 128, dtype=DType.BF16),
    _case("groups", 12, 72, 4),
    _case("groups bf16", 8, 64, 4, DType.BF16),
)
