"""The seeded cases of block_conv."""

import numpy as np

from spark_engine.op import Attrs, Case, rtol_of
from spark_engine.plugins.common.random_arrays import normal
from spark_engine.plugins.ops.drafts.block_conv import SIDES, TAPS
from spark_engine.tensors import Array, DType


def _case(rows: int, tile: int, side: int, h: int, group: int, dtype: DType = DType.F32) -> Case:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x = normal(rng, rows * tile, h, dtype=dtype)
        deltas = normal(rng, rows * tile, SIDES * TAPS * h // group, scale=0.3, dtype=dtype)
        return x, deltas, normal(rng, SIDES * TAPS, h)

    label = f"{rows} rows of {tile}, side {side}, {h} in groups of {group}, {dtype}"
    attrs: Attrs = {"tile": tile, "side": side}
    return Case(label, attrs, make, rtol=rtol_of(dtype), atol=1e-6)


CASES = (
    _case(1, 8, 0, 64, 16),
    _case(3, 8, 1, 64, 16),
    _case(2, 2, 1, 96, 8),
    _case(4, 5, 0, 256, 16, DType.BF16),
    _case(2, 8, 1, 5120, 16, DType.BF16),
)
