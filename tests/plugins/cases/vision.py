"""The seeded cases of the ops of the vision tower."""

import numpy as np

from spark_engine.op import Attrs, Case, Inputs, rtol_of
from spark_engine.plugins.common import random_arrays
from spark_engine.tensors import Array, DType
from tests.plugins.cases.rounds import without_scratch


def _layer_norm_inputs(rows: int, width: int, dtype: DType = DType.F32) -> Inputs:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x = rng.standard_normal((rows, width)) * 2 + 3
        x[rows // 2] = 1.5  # a row without variance divides by sqrt(eps)
        weight, bias = 1 + 0.1 * rng.standard_normal(width), rng.standard_normal(width)
        return x.astype(dtype.numpy), weight.astype(np.float32), bias.astype(np.float32)

    return make


def _layer_norm(
    label: str, rows: int, width: int, group: int = 1, dtype: DType = DType.F32
) -> Case:
    rtol, attrs = rtol_of(dtype), {"eps": 1e-6, "group": group}
    return Case(label, attrs, _layer_norm_inputs(rows, width, dtype), rtol, rtol, bench=rows == 65)


LAYER_NORM = (
    _layer_norm("one row", 1, 64),
    _layer_norm("odd width", 3, 37),
    _layer_norm("many rows", 65, 256),
    _layer_norm("bf16", 5, 128, dtype=DType.BF16),
    _layer_norm("groups", 12, 72, 4),
    _layer_norm("groups bf16", 8, 64, 4, DType.BF16),
)


def _linear_bias(
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


LINEAR_BIAS = (
    _linear_bias((3, 40, 48)),
    _linear_bias((5, 36, 64), "tanh"),
    _linear_bias((4, 64, 96), "erf"),
    _linear_bias((65, 48, 40), residual=True),
    _linear_bias((4, 64, 64), weight=DType.BF16),
    _linear_bias((8, 64, 64), "tanh", dtype=DType.BF16, weight=DType.BF16),
    _linear_bias((8, 64, 64), "erf", dtype=DType.BF16, weight=DType.BF16),
    _linear_bias((6, 64, 128), residual=True, dtype=DType.BF16, weight=DType.BF16),
)


def _store_rows_inputs(rows: int, live: int, first: int, dtype: DType) -> Inputs:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x = rng.standard_normal((rows, 24))
        x[live // 4 :] = np.nan
        state = rng.standard_normal((13, 24)).astype(dtype.numpy)
        steps = (np.asarray([n], np.int32) for n in (live, first))
        return x.astype(dtype.numpy), *steps, state

    return make


def _store_rows(label: str, rows: int, live: int, first: int, dtype: DType = DType.F32) -> Case:
    make = _store_rows_inputs(rows, live, first, dtype)
    return Case(label, {"group": 4}, make, ignore=without_scratch(0))


STORE_ROWS = (
    _store_rows("all rows", 6, 24, 0),
    _store_rows("padding", 8, 20, 5),
    _store_rows("to the end", 8, 32, 4),
    _store_rows("beyond the end", 8, 32, 8),
    _store_rows("bf16", 5, 12, 2, DType.BF16),
)


def _vision_attention_inputs(count: int, live: int, heads: int, dim: int, dtype: DType) -> Inputs:
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


def _vision_attention(
    count: int, live: int, heads: int = 2, dim: int = 72, dtype: DType = DType.F32
) -> Case:
    def ignore(outputs: tuple[Array, ...]) -> None:
        outputs[0][live:] = 0

    made = _vision_attention_inputs(count, live, heads, dim, dtype)
    label, rtol = f"{live} of {count}, {heads}x{dim} {dtype}", rtol_of(dtype)
    return Case(label, {"heads": heads}, made, rtol, 3 * rtol, ignore=ignore)


VISION_ATTENTION = (
    _vision_attention(12, 12),
    _vision_attention(24, 16),
    _vision_attention(8, 4, 3, 16),
    _vision_attention(516, 300, 1, 32),  # tiles of 4
    _vision_attention(512, 400, 1, 32),  # two tiles
    _vision_attention(16, 12, dtype=DType.BF16),
    _vision_attention(1024, 700),  # several tiles of keys, the last of them in part
    _vision_attention(2304, 2101, 1, 64),
)


def _vision_patches_inputs(count: int, width: int, dtype: DType) -> Inputs:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        taps = rng.integers(0, 9, (count, 4)).astype(np.int32)
        taps[-1] = 1 << 30, -(1 << 31), 0, 8  # of padding
        weights = rng.random((count, 4)).astype(np.float32)
        pixels = np.stack([rng.uniform(0.005, 0.02, 48), rng.uniform(-2, 2, 48)])
        patches = rng.integers(0, 256, (count, 48)).astype(np.uint8)
        table = rng.standard_normal((9, width)).astype(dtype.numpy)
        return patches, taps, weights, pixels.astype(np.float32), table

    return make


def _vision_patches(count: int, width: int, dtype: DType, table: DType) -> Case:
    rtol = rtol_of(dtype)
    attrs: Attrs = {"dtype": dtype.value}
    return Case(
        f"{count}x{width} {table} {dtype}",
        attrs,
        _vision_patches_inputs(count, width, table),
        rtol,
        rtol,
    )


VISION_PATCHES = (
    _vision_patches(7, 20, DType.F32, DType.F32),
    _vision_patches(4, 64, DType.F32, DType.BF16),
    _vision_patches(8, 64, DType.BF16, DType.BF16),
)


CASES = {
    "layer_norm": LAYER_NORM,
    "linear_bias": LINEAR_BIAS,
    "store_rows": STORE_ROWS,
    "vision_attention": VISION_ATTENTION,
    "vision_patches": VISION_PATCHES,
}
