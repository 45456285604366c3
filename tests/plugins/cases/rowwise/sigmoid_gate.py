"""The seeded cases of sigmoid_gate."""

import numpy as np

from spark_engine.op import Attrs, Case, rtol_of
from spark_engine.plugins.ops.rowwise.sigmoid_gate import arrays
from spark_engine.tensors import Array, DType


def _case(rows: int, heads: int, dim: int, dtype: DType = DType.F32, bench: bool = False) -> Case:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        return arrays(rng, rows, heads, dim, dtype)

    attrs: Attrs = {"heads": heads, "head_dim": dim}
    return Case(f"{rows} rows {heads}x{dim} {dtype}", attrs, make, rtol=rtol_of(dtype), bench=bench)


CASES = (
    _case(1, 2, 32),
    _case(3, 3, 20),
    _case(65, 4, 64, bench=True),
    _case(3, 2, 32, DType.BF16),
)
