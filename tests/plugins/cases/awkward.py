"""Activations that quantisers find hard."""

import numpy as np

from spark_engine.plugins.common.random_arrays import Rng
from spark_engine.tensors import Array, DType


def awkward(rng: Rng, rows: int, width: int, dtype: DType = DType.F32) -> Array:
    """Activations that quantisers find hard, one kind a row, then normal rows.

    Row 1 zeros, 2 saturating, 3 subnormal, 4 exact ties of both formats, 5 NaN.
    """
    x = rng.standard_normal((rows, width)).astype(np.float32)
    kinds = (None, 0.0, 1e6, 1e-41)
    for row, factor in enumerate(kinds[:rows]):
        if factor is not None:
            x[row] *= np.float32(factor)
    if rows > 4:
        ties = (0.25, -0.75, 1.25, -1.75, 2.5, -3.5, 5.0, 6.0, 17.0, -19.0, 0.0)
        x[4] = np.resize(np.array(ties, np.float32), width)
    if rows > 5:
        x[5] = np.nan
    result: Array = x.astype(dtype.numpy)
    return result
