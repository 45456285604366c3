"""The seeded cases of fp8_quant."""

import numpy as np

from spark_engine.op import Attrs, Case, Inputs
from spark_engine.plugins.common import random_arrays
from spark_engine.tensors import Array, DType
from tests.plugins.cases.awkward import awkward


def _inputs(rows: int, width: int, dtype: DType = DType.F32, scaled: bool = True) -> Inputs:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x = awkward(rng, rows, width, dtype)
        return (x, np.asarray(rng.uniform(0.01, 1), np.float32)) if scaled else (x,)

    return make


NAN_ROW = random_arrays.ignore_rows(5)

_TOKEN: Attrs = {"by_token": 1}

_HALVES: Attrs = {"by_token": 1, "halves": 1}

CASES = (
    Case("one row", {}, _inputs(1, 64)),
    Case("awkward values, odd width", {}, _inputs(7, 37), ignore=NAN_ROW),
    Case("many rows", {}, _inputs(65, 256), ignore=NAN_ROW, bench=True),
    Case("bf16", {}, _inputs(6, 64, DType.BF16), ignore=NAN_ROW),
    Case("by token", _TOKEN, _inputs(1, 64, scaled=False)),
    Case("by token, odd width", _TOKEN, _inputs(7, 37, scaled=False), ignore=NAN_ROW),
    Case("halves", _HALVES, _inputs(7, 48, scaled=False), ignore=NAN_ROW),
    Case("halves, bf16", _HALVES, _inputs(6, 272, DType.BF16, False), ignore=NAN_ROW),
    Case("by token, wide bf16", _TOKEN, _inputs(6, 17408, DType.BF16, False), ignore=NAN_ROW),
)
