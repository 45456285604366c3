"""What the cases of the linear ops share: label, tolerance, rows of zeros and NaN."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from spark_engine.op import Case, Inputs, rtol_of
from spark_engine.plugins.common import random_arrays
from spark_engine.tensors import DType


def case(
    size: tuple[int, int, int],
    operands: Inputs,
    dtype: DType = DType.F32,
    bench: bool = False,
    slack: float = 2.0,
) -> Case:
    """y `dtype`[m, n] over k for `size` = (m, n, k); atol is `slack` times rtol."""
    rtol = rtol_of(dtype)
    label = f"{size[0]}x{size[1]}x{size[2]} {dtype}"
    return Case(label, {"dtype": dtype.value}, operands, rtol, slack * rtol, bench=bench)


def activations(
    rng: np.random.Generator, m: int, k: int, scale: float = 1.0
) -> NDArray[np.float32]:
    """Normal f32 [m, k]; of three rows or more, row 1 is zeros and row 2 NaN."""
    x = random_arrays.normal(rng, m, k, scale=scale).astype(np.float32)
    if m > 2:
        x[1], x[2] = 0, np.nan
    return x
