"""The seeded cases of nvfp4_quant."""

import numpy as np

from spark_engine.op import Case, Inputs
from spark_engine.plugins.common import random_arrays
from spark_engine.tensors import Array, DType
from tests.plugins.cases.awkward import awkward


def _inputs(rows: int, width: int, dtype: DType = DType.F32, scale: float = 1e-3) -> Inputs:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x = awkward(rng, rows, width, dtype)
        return x, np.asarray(scale, np.float32)

    return make


NAN_ROW = random_arrays.ignore_rows(5)

CASES = (
    Case("one row", {}, _inputs(1, 64)),
    Case("odd number of blocks", {}, _inputs(7, 48), ignore=NAN_ROW),
    Case("exact ties", {}, _inputs(7, 176, scale=1.0), ignore=NAN_ROW),
    Case("scales that round to zero", {}, _inputs(3, 32, scale=1e5)),
    Case("many rows", {}, _inputs(65, 256), ignore=NAN_ROW, bench=True),
    Case("bf16", {}, _inputs(6, 64, DType.BF16), ignore=NAN_ROW),
)
