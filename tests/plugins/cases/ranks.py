"""The seeded cases of what ranks make together."""

from dataclasses import replace

import numpy as np

from spark_engine.op import Case
from spark_engine.plugins.common import random_arrays
from spark_engine.plugins.ops.norm.norm_quant import NORM
from spark_engine.tensors import Array, DType
from tests.plugins.cases.rowwise import NORM_QUANT


def _all_reduce(rows: int, columns: int, dtype: DType, bench: bool = False) -> Case:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        return (random_arrays.normal(rng, rows, columns, dtype=dtype),)

    return Case(f"{rows}x{columns} {dtype}", {"ranks": 1}, make, bench=bench)


ALL_REDUCE = (
    _all_reduce(1, 64, DType.F32),
    _all_reduce(3, 40, DType.F32),
    _all_reduce(1, 256, DType.BF16),
    _all_reduce(65, 136, DType.BF16, bench=True),
)


def _gather_logits(rows: int, columns: int) -> Case:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        return (random_arrays.normal(rng, rows, columns),)

    return Case(f"{rows}x{columns}", {"ranks": 1}, make)


GATHER_LOGITS = (_gather_logits(1, 128), _gather_logits(5, 68))


def _reduce_norm_quant(case: Case) -> Case:
    own = {name: case.attrs[name] for name in NORM}
    label = case.label.replace(" add1", "")
    return replace(case, label=label, attrs={"ranks": 1, **own})


REDUCE_NORM_QUANT = tuple(_reduce_norm_quant(case) for case in NORM_QUANT if case.attrs["add"])


CASES = {
    "all_reduce": ALL_REDUCE,
    "gather_logits": GATHER_LOGITS,
    "reduce_norm_quant": REDUCE_NORM_QUANT,
}
