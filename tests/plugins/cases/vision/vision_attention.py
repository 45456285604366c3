"""The seeded cases of vision_attention."""

import numpy as np

from spark_engine.op import Case, Inputs, rtol_of
from spark_engine.tensors import Array, DType


def _inputs(count: int, live: int, heads: int, dim: int, dtype: DType) -> Inputs:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        qkv = rng.standard_normal((count, 3 * heads * dim)) * 1.5
        qkv[live:] = np.nan
        coords = rng.integers(0, 100, (count, 2))
        coords[live:] = 1 << 30
        inv_freq = 10_000.0 ** (-np.arange(dim // 4) / (dim // 4))
        return (
            qkv.astype(dtype.numpy), coords.astype(np.int32), inv_freq.astype(np.float32),
            np.asarray([live], np.int32),
        )  # fmt: skip

    return make


def _case(count: int, live: int, heads: int = 2, dim: int = 72, dtype: DType = DType.F32) -> Case:
    def ignore(outputs: tuple[Array, ...]) -> None:
        outputs[0][live:] = 0

    made = _inputs(count, live, heads, dim, dtype)
    label, rtol = f"{live} of {count}, {heads}x{dim} {dtype}", rtol_of(dtype)
    return Case(label, {"heads": heads}, made, rtol, 3 * rtol, ignore=ignore)


CASES = (
    _case(12, 12),
    _case(24, 16),
    _case(8, 4, 3, 16),
    _case(516, 300, 1, 32),  # tiles of 4
    _case(512, 400, 1, 32),  # two tiles
    _case(16, 12, dtype=DType.BF16),
    _case(1024, 700),  # several tiles of keys, the last of them in part
    _case(2304, 2101, 1, 64),
)
