"""The seeded cases of gather_logits."""

import numpy as np

from spark_engine.op import Case
from spark_engine.plugins.common import random_arrays
from spark_engine.tensors import Array


def _case(rows: int, columns: int) -> Case:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        return (random_arrays.normal(rng, rows, columns),)

    return Case(f"{rows}x{columns}", {"ranks": 1}, make)


CASES = (_case(1, 128), _case(5, 68))
