"""The seeded cases of fp8_block_quant."""

import numpy as np

from spark_engine.op import Case, Inputs
from spark_engine.plugins.common import random_arrays
from spark_engine.tensors import Array, DType
from tests.plugins.cases.awkward import awkward


def _inputs(rows: int, width: int, dtype: DType = DType.F32) -> Inputs:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x = awkward(rng, rows, width, dtype)
        x[0, width // 2 :] = 0  # a block of zeros in a row that is not
        return (x,)

    return make


NAN_ROW = random_arrays.ignore_rows(5)

CASES = (
    Case("one row", {}, _inputs(1, 256)),
    Case("narrow last block", {}, _inputs(7, 200), ignore=NAN_ROW),
    Case("narrower than a block", {}, _inputs(3, 48)),
    Case("many rows", {}, _inputs(65, 256), ignore=NAN_ROW, bench=True),
    Case("bf16", {}, _inputs(6, 384, DType.BF16), ignore=NAN_ROW),
)
