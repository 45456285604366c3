"""The seeded cases of store_rows."""

import numpy as np

from spark_engine.op import Case, Inputs
from spark_engine.tensors import Array, DType


def _inputs(rows: int, live: int, first: int, dtype: DType) -> Inputs:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x = rng.standard_normal((rows, 24))
        x[live // 4 :] = np.nan
        state = rng.standard_normal((13, 24)).astype(dtype.numpy)
        steps = (np.asarray([n], np.int32) for n in (live, first))
        return x.astype(dtype.numpy), *steps, state

    return make


def _ignore(outputs: tuple[Array, ...]) -> None:
    outputs[0][-1] = 0


def _case(label: str, rows: int, live: int, first: int, dtype: DType = DType.F32) -> Case:
    return Case(label, {"group": 4}, _inputs(rows, live, first, dtype), ignore=_ignore)


CASES = (
    _case("all rows", 6, 24, 0),
    _case("padding", 8, 20, 5),
    _case("to the end", 8, 32, 4),
    _case("beyond the end", 8, 32, 8),
    _case("bf16", 5, 12, 2, DType.BF16),
)
