"""The seeded cases of linear_bias."""

import numpy as np

from spark_engine.op import Case, rtol_of
from spark_engine.plugins.common import random_arrays
from spark_engine.tensors import Array, DType


def _case(
    size: tuple[int, int, int], gelu: str = "", residual: bool = False,
    dtype: DType = DType.F32, weight: DType = DType.F32,
) -> Case:  # fmt: skip
    m, n, k = size

    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x = random_arrays.normal(rng, m, k, dtype=dtype)
        w = random_arrays.normal(rng, n, k, scale=2 * k**-0.5, dtype=weight)
        bias = random_arrays.normal(rng, n)
        bias[0], bias[-1] = 30, -30  # far outside of where gelu bends
        more = (random_arrays.normal(rng, m, n, dtype=dtype),) if residual else ()
        return x, w, bias, *more

    rtol = rtol_of(dtype)
    words = (f"{m}x{n}x{k}", gelu, "residual" * residual, weight, dtype)
    label = " ".join(str(word) for word in words if word)
    return Case(label, {"gelu": gelu}, make, rtol, rtol, bench=m == 65)


CASES = (
    _case((3, 40, 48)),
    _case((5, 36, 64), "tanh"),
    _case((4, 64, 96), "erf"),
    _case((65, 48, 40), residual=True),
    _case((4, 64, 64), weight=DType.BF16),
    _case((8, 64, 64), "tanh", dtype=DType.BF16, weight=DType.BF16),
    _case((8, 64, 64), "erf", dtype=DType.BF16, weight=DType.BF16),
    _case((6, 64, 128), residual=True, dtype=DType.BF16, weight=DType.BF16),
)
