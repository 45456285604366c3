"""The seeded cases of nvfp4_widen."""

import numpy as np

from spark_engine.op import Case, Inputs
from spark_engine.plugins.formats import numpy_codecs
from spark_engine.tensors import Array, DType
from tests.plugins.cases.awkward import awkward


def _inputs(rows: int, width: int) -> Inputs:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x = awkward(rng, rows, width).astype(np.float32)
        return numpy_codecs.nvfp4_quantise(x, np.float32(1e-3))

    return make


def _case(label: str, rows: int, width: int, dtype: DType = DType.BF16) -> Case:
    return Case(label, {"dtype": dtype.value}, _inputs(rows, width), 0.0, 0.0, bench=rows == 65)


CASES = (
    _case("one row", 1, 64),
    _case("f32, odd number of blocks", 7, 48, DType.F32),
    _case("odd number of blocks", 7, 48),
    _case("many rows", 65, 256),
)
