"""The seeded cases of gated_norm."""

import numpy as np

from spark_engine.op import Attrs, Case, Inputs, rtol_of
from spark_engine.plugins.common import random_arrays
from spark_engine.tensors import Array, DType


def arrays(
    rng: np.random.Generator, rows: int, heads: int, dim: int, offset: int, dtype: DType
) -> tuple[Array, ...]:
    """o with a row of zeros, packed with NaN in every column that is not z's, weight."""
    o = random_arrays.normal(rng, rows, heads * dim, dtype=dtype)
    o[rows // 2] = 0
    packed = np.full((rows, offset + heads * dim + 3), np.nan, dtype.numpy)
    z = random_arrays.normal(rng, rows, heads * dim, scale=4.0, dtype=dtype)
    z[0, :2] = (-200.0, 200.0)
    packed[:, offset:-3] = z
    return o, packed, random_arrays.positive(rng, dim)


def _case(
    rows: int, heads: int, dim: int, offset: int, dtype: DType = DType.F32, bench: bool = False
) -> Case:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        return arrays(rng, rows, heads, dim, offset, dtype)

    inputs: Inputs = make
    attrs: Attrs = {"eps": 1e-6, "heads": heads, "offset": offset}
    label = f"{rows} rows, {heads}x{dim} at {offset} {dtype}"
    return Case(label, attrs, inputs, rtol=rtol_of(dtype), bench=bench)


CASES = (
    _case(1, 3, 32, 0),
    _case(3, 2, 24, 7),
    _case(65, 4, 128, 1024, bench=True),
    _case(3, 4, 64, 5, DType.BF16),
)
