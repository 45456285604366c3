"""The seeded cases of shared_gate."""

import numpy as np

from spark_engine.op import Case
from spark_engine.plugins.common import random_arrays
from spark_engine.tensors import Array, DType


def _case(rows: int, k: int, weight: DType, dtype: DType = DType.F32, bench: bool = False) -> Case:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        three = [random_arrays.normal(rng, rows, k, dtype=dtype) for _ in range(3)]
        return (*three, random_arrays.normal(rng, 1, k, dtype=weight))

    rtol, atol = (1e-5, 1e-5) if dtype is DType.F32 else (1e-2, 1e-2)
    return Case(f"{rows}x{k} {weight} {dtype}", {}, make, rtol=rtol, atol=atol, bench=bench)


CASES = (
    _case(1, 64, DType.F32),
    _case(3, 37, DType.BF16),
    _case(65, 256, DType.BF16, bench=True),
    _case(3, 64, DType.BF16, DType.BF16),
)
