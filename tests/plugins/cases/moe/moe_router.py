"""The seeded cases of moe_router."""

import numpy as np

from spark_engine.op import Case
from spark_engine.plugins.common import random_arrays
from spark_engine.tensors import Array, DType


def _case(
    m: int,
    experts: int,
    k: int,
    top_k: int,
    gate: bool = False,
    weight: DType = DType.F32,
    dtype: DType = DType.F32,
    bench: bool = False,
) -> Case:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x = random_arrays.normal(rng, m, k, dtype=dtype)
        if m > 5:
            x[1], x[5] = 0, np.nan  # a row of ties, a row of NaN
            x[2] *= np.asarray(60.0, x.dtype)  # logits far apart: exponentials underflow
        w = random_arrays.normal(rng, experts, k, scale=2 * k**-0.5, dtype=weight)
        return (
            (x, w, random_arrays.normal(rng, 1, k, scale=k**-0.5, dtype=weight)) if gate else (x, w)
        )

    ignore = random_arrays.ignore_rows(5) if m > 5 else None
    label = f"{m} rows, {top_k} of {experts}, {k} wide {weight} {dtype}{' gate' if gate else ''}"
    # weights are at most 1 and an error of 1e-6 in a logit moves them by as much
    return Case(label, {"top_k": top_k}, make, 1e-4, 1e-6, bench=bench, ignore=ignore)


def _ties(rng: np.random.Generator) -> tuple[Array, ...]:
    """Small integers: equal logits are exactly equal in every precision."""
    x = rng.integers(-1, 2, (9, 8)).astype(np.float32)
    return x, rng.integers(-1, 2, (12, 8)).astype(np.float32)


CASES = (
    _case(1, 16, 64, 4),
    _case(1, 16, 64, 4, gate=True),
    _case(7, 8, 37, 1),
    _case(7, 6, 48, 6, gate=True),
    _case(65, 64, 256, 8, gate=True, weight=DType.BF16, bench=True),
    _case(3, 8, 64, 3, weight=DType.BF16, dtype=DType.BF16),
    _case(130, 16, 192, 4, gate=True, weight=DType.BF16, dtype=DType.BF16),
    Case("ties go to the lowest index", {"top_k": 5}, _ties),
)
