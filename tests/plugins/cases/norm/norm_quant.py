"""The seeded cases of norm_quant."""

import numpy as np

from spark_engine.op import Attrs, Case, Inputs, rtol_of
from spark_engine.plugins.common import random_arrays
from spark_engine.plugins.formats import quantised
from spark_engine.tensors import Array, DType
from tests.plugins.cases.awkward import awkward
from tests.plugins.cases.scales import static_scales


def _inputs(attrs: Attrs, rows: int, width: int, dtype: DType = DType.F32) -> Inputs:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x = awkward(rng, rows, width, dtype)
        operands = [x, random_arrays.positive(rng, width)]
        if attrs["add"]:
            operands.append(random_arrays.normal(rng, rows, width, dtype=dtype))
        if quantised.takes_scales(attrs):
            operands.append(static_scales(rng, int(attrs["n"])))
        return tuple(operands)

    return make


def _case(
    rows: int,
    width: int,
    quant: str,
    n: int = 1,
    add: int = 0,
    keep: int = 0,
    bench: bool = False,
    dtype: DType = DType.F32,
) -> Case:
    attrs: Attrs = {"eps": 1e-6, "add": add, "keep": keep, "quant": quant, "n": n}
    nan = random_arrays.ignore_rows(5) if rows > 5 else None
    label = f"{rows}x{width} {quant} n{n} add{add} keep{keep} {dtype}"
    inputs = _inputs(attrs, rows, width, dtype)
    return Case(label, attrs, inputs, rtol=rtol_of(dtype), ignore=nan, bench=bench)


CASES = (
    _case(1, 64, "fp8", add=1),
    _case(7, 48, "fp8", n=3, add=1, keep=1, bench=True),
    _case(3, 37, "fp8"),
    _case(7, 200, "fp8_block", add=1, keep=1),
    _case(1, 256, "fp8_block"),
    _case(7, 48, "nvfp4", n=2, add=1, bench=True),
    _case(1, 16, "nvfp4", keep=1),
    _case(3, 64, "none", add=1, keep=1),
    _case(7, 200, "fp8_token", add=1, keep=1),
    _case(1, 8200, "fp8_token"),
    _case(3, 208, "fp8_halves", add=1),
    _case(3, 128, "fp8", add=1, keep=1, dtype=DType.BF16),
    _case(3, 128, "nvfp4", add=1, dtype=DType.BF16),
)
