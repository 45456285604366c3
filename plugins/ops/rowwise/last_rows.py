"""The last valid token of each row: y[r] = x[r·tile + counts[r] − 1].

A row without tokens yields its first token's value: finite and unspecified.
"""

import numpy as np

from spark_engine.op import Attrs, Case, Inputs, Op
from spark_engine.operand import Result
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.kernels.rowwise import rows_kernels
from spark_engine.plugins.launch import serve
from spark_engine.tensors import Array, DType, TensorSpec


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """(x, counts) -> (y,)."""
    x, counts = arrays
    tile = int(attrs["tile"])
    picked = [row * tile + min(max(int(n), 1), tile) - 1 for row, n in enumerate(counts)]
    return (x[picked],)


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """One gather."""
    f = Text()
    tile = int(attrs["tile"])
    inside = f("Clip", f("Sub", f.long("counts"), 1), 0, tile - 1)
    f("Gather", "x", f("Add", inside, f("Mul", f.indices("counts"), tile)), out="y")
    return f.function("last_rows", ("x", "counts"), ("y",))


def _inputs(counts: tuple[int, ...], tile: int, dtype: DType = DType.F32) -> Inputs:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x = np.full((len(counts), tile, 24), np.nan)
        for row, n in enumerate(counts):
            x[row, max(n, 1) - 1] = rng.standard_normal(24)
        return x.reshape(-1, 24).astype(dtype.numpy), np.asarray(counts, np.int32)

    return make


CASES = (
    Case("decode", {"tile": 1}, _inputs((1, 0, 1, 1), 1)),
    Case("round", {"tile": 4}, _inputs((4, 1, 0, 3, 2), 4)),
    Case("round of two", {"tile": 2}, _inputs((2, 0, 1), 2, DType.BF16)),
    Case("longest round", {"tile": 8}, _inputs((8, 5), 8, DType.BF16)),
    Case("one tile", {"tile": 64}, _inputs((64,), 64)),
    Case("ragged", {"tile": 64}, _inputs((64, 1, 0, 63, 17), 64)),
    Case("bf16", {"tile": 64}, _inputs((2, 64), 64, DType.BF16)),
)

OP = serve(
    Op(
        name="last_rows",
        operands=(operands.x("A[tokens,H]"), operands.COUNTS),
        results=(Result("y", "A[rows,H]"),),
        attrs={"tile": None},
        reference=reference,
        body=body,
        cases=CASES,
    ),
    rows_kernels.LAST_ROWS,
)
