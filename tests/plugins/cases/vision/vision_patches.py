"""The seeded cases of vision_patches."""

import numpy as np

from spark_engine.op import Attrs, Case, Inputs, rtol_of
from spark_engine.tensors import Array, DType


def _inputs(count: int, width: int, dtype: DType) -> Inputs:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        taps = rng.integers(0, 9, (count, 4)).astype(np.int32)
        taps[-1] = 1 << 30, -(1 << 31), 0, 8  # of padding
        weights = rng.random((count, 4)).astype(np.float32)
        pixels = np.stack([rng.uniform(0.005, 0.02, 48), rng.uniform(-2, 2, 48)])
        patches = rng.integers(0, 256, (count, 48)).astype(np.uint8)
        table = rng.standard_normal((9, width)).astype(dtype.numpy)
        return patches, taps, weights, pixels.astype(np.float32), table

    return make


def _case(count: int, width: int, dtype: DType, table: DType) -> Case:
    rtol = rtol_of(dtype)
    attrs: Attrs = {"dtype": dtype.value}
    return Case(f"{count}x{width} {table} {dtype}", attrs, _inputs(count, width, table), rtol, rtol)


CASES = (
    _case(7, 20, DType.F32, DType.F32),
    _case(4, 64, DType.F32, DType.BF16),
    _case(8, 64, DType.BF16, DType.BF16),
)
