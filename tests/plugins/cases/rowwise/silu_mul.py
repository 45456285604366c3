"""The seeded cases of silu_mul."""

import numpy as np

from spark_engine.op import Case, rtol_of
from spark_engine.plugins.common import random_arrays
from spark_engine.tensors import Array, DType


def _case(rows: int, half: int, dtype: DType = DType.F32, bench: bool = False) -> Case:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x = random_arrays.normal(rng, rows, 2 * half, scale=4.0, dtype=dtype)
        x[0, :4] = (-100.0, 100.0, -0.0, 1e-30)
        return (x,)

    return Case(f"{rows}x{half} {dtype}", {}, make, rtol=rtol_of(dtype), bench=bench)


CASES = (
    _case(1, 64),
    _case(3, 37),
    _case(65, 128, bench=True),
    _case(3, 64, DType.BF16),
)
