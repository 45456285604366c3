"""The seeded cases of the stand-alone quantisers."""

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


def _blocks(rows: int, width: int, dtype: DType = DType.F32) -> Inputs:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x = awkward(rng, rows, width, dtype)
        x[0, width // 2 :] = 0  # a block of zeros in a row that is not
        return (x,)

    return make


def _scaled(rows: int, width: int, dtype: DType = DType.F32, scale: float = 1e-3) -> Inputs:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        return awkward(rng, rows, width, dtype), np.asarray(scale, np.float32)

    return make


NAN_ROW = random_arrays.ignore_rows(5)
_TOKEN: Attrs = {"by_token": 1}
_HALVES: Attrs = {"by_token": 1, "halves": 1}

FP8 = (
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
FP8_BLOCK = (
    Case("one row", {}, _blocks(1, 256)),
    Case("narrow last block", {}, _blocks(7, 200), ignore=NAN_ROW),
    Case("narrower than a block", {}, _blocks(3, 48)),
    Case("many rows", {}, _blocks(65, 256), ignore=NAN_ROW, bench=True),
    Case("bf16", {}, _blocks(6, 384, DType.BF16), ignore=NAN_ROW),
)
NVFP4 = (
    Case("one row", {}, _scaled(1, 64)),
    Case("odd number of blocks", {}, _scaled(7, 48), ignore=NAN_ROW),
    Case("exact ties", {}, _scaled(7, 176, scale=1.0), ignore=NAN_ROW),
    Case("scales that round to zero", {}, _scaled(3, 32, scale=1e5)),
    Case("many rows", {}, _scaled(65, 256), ignore=NAN_ROW, bench=True),
    Case("bf16", {}, _scaled(6, 64, DType.BF16), ignore=NAN_ROW),
)
CASES = {"fp8_quant": FP8, "fp8_block_quant": FP8_BLOCK, "nvfp4_quant": NVFP4}
