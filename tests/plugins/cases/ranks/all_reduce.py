"""The seeded cases of all_reduce."""

import numpy as np

from spark_engine.op import Case
from spark_engine.plugins.common import random_arrays
from spark_engine.tensors import Array, DType


def _case(rows: int, columns: int, dtype: DType, bench: bool = False) -> Case:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        return (random_arrays.normal(rng, rows, columns, dtype=dtype),)

    return Case(f"{rows}x{columns} {dtype}", {"ranks": 1}, make, bench=bench)


CASES = (
    _case(1, 64, DType.F32),
    _case(3, 40, DType.F32),
    _case(1, 256, DType.BF16),
    _case(65, 136, DType.BF16, bench=True),
)
