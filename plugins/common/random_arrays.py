"""Seeded arrays for the ops' cases."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from spark_engine.tensors import Array, DType

Rng = np.random.Generator


def normal(rng: Rng, *shape: int, scale: float = 1.0, dtype: DType = DType.F32) -> Array:
    """Normal values with the standard deviation `scale`."""
    values: Array = (rng.standard_normal(shape) * scale).astype(dtype.numpy)
    return values


def positive(rng: Rng, *shape: int, low: float = 0.5, high: float = 2.0) -> NDArray[np.float32]:
    """f32 values between `low` and `high`, for scales."""
    return np.asarray(rng.uniform(low, high, shape), np.float32)


def ignore_rows(*rows: int) -> Callable[[tuple[Array, ...]], None]:
    """An `ignore` for rows of NaN: their results are unspecified."""

    def ignore(outputs: tuple[Array, ...]) -> None:
        for array in outputs:
            array[list(rows)] = np.zeros((), array.dtype)

    return ignore
