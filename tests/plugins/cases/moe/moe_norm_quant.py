"""The seeded cases of moe_norm_quant."""

import numpy as np

from spark_engine.op import Attrs, Case, rtol_of
from spark_engine.plugins.common import random_arrays
from spark_engine.plugins.formats import quantised
from spark_engine.plugins.ops.moe import grouped_moe
from spark_engine.tensors import Array, DType
from tests.plugins.cases.scales import static_scales


def _case(
    kind: str,
    rows: int,
    sizes: tuple[int, int, int, int],
    quant: str = "none",
    n: int = 1,
    keep: int = 0,
    dtype: DType = DType.F32,
) -> Case:
    attrs: Attrs = {"format": kind, "dtype": dtype.value, "eps": 1e-6}
    attrs = {**attrs, "keep": keep, "quant": quant, "n": n}

    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x, ids, weights, *params = grouped_moe.arrays(rng, kind, rows, sizes)
        residual = random_arrays.normal(rng, rows, sizes[2], scale=3.0)
        if rows > 5:
            x[1], x[5], residual[3] = 0, np.nan, 0
        norm_weight = random_arrays.positive(rng, sizes[2])
        scales = [static_scales(rng, n)]
        narrow = dtype.numpy
        operands = (x.astype(narrow), ids, weights, residual.astype(narrow), norm_weight, *params)
        return (*operands, *scales[: quantised.takes_scales(attrs)])

    label = f"{kind} {rows} rows, {sizes[1]} of {sizes[0]}, {sizes[2]}x{sizes[3]} {quant} n{n}"
    ignore = random_arrays.ignore_rows(5) if rows > 5 else None
    rtol = rtol_of(dtype)
    bench = rows > 5
    return Case(f"{label} keep{keep} {dtype}", attrs, make, rtol, rtol, bench, ignore)


CASES = (
    _case("dense", 1, (8, 2, 64, 48), keep=1),
    _case("dense", 7, (4, 1, 48, 19), "fp8", keep=1),
    _case("nvfp4", 1, (8, 3, 64, 32), "fp8"),
    _case("nvfp4", 33, (16, 4, 128, 48), "fp8", n=2, keep=1),
    _case("nvfp4", 7, (4, 4, 64, 32), "nvfp4"),
    _case("nvfp4_a4", 7, (4, 2, 48, 16), "nvfp4", n=2, keep=1),
    _case("fp8", 7, (5, 3, 48, 32), "fp8"),
    _case("fp8_block", 7, (3, 2, 256, 128), "fp8_block", keep=1),
    _case("fp8_block", 1, (4, 2, 128, 128), "fp8_block"),
    _case("fp8_channel", 7, (4, 2, 64, 48), "fp8_token", keep=1),
    _case("nvfp4", 3, (4, 2, 64, 32), "fp8", keep=1, dtype=DType.BF16),
)
