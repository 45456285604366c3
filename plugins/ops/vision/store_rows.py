"""Writes the tower's rows into the state of images: image_rows[first + r] = x[r].

Of the rows of `group` patches the first live / group are written; the others, of padding, may be
written to the state's last row, which is scratch. A row beyond the state is not kept either.
"""

import numpy as np

from spark_engine.op import Attrs, Op
from spark_engine.operand import Operand, Result, Role
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.kernels.vision.store_rows_kernels import CANDIDATES
from spark_engine.plugins.launch import serve
from spark_engine.tensors import Array, TensorSpec


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """(x, live, first, image_rows) -> (image_rows_out,), row by row."""
    x, live, first, image_rows = arrays
    kept = image_rows.copy()
    for row in range(int(live[0]) // int(attrs["group"])):
        if 0 <= int(first[0]) + row < len(kept) - 1:
            kept[int(first[0]) + row] = x[row]
    return (kept,)


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """One ScatterND."""
    f, node = Text(), OP.named(attrs, specs)
    rows, scratch = np.arange(node.dim("rows"), dtype=np.int32), np.int32(node.dim("I"))
    to = f("Add", "first", rows)
    inside = f("And", f("Less", rows * np.int32(node.number("group")), "live"),
               f("And", f("GreaterOrEqual", to, np.int32(0)), f("Less", to, scratch)))  # fmt: skip
    at = f.long(f("Unsqueeze", f("Where", inside, to, scratch), [1]))
    f("ScatterND", "image_rows", at, "x", out="image_rows_out")
    return f.function("store_rows", OP.inputs, OP.outputs)


OP = serve(
    Op(
        name="store_rows",
        operands=(
            operands.x("A[rows,H]"),
            Operand("live", Role.STEP, "i32[1]"),
            Operand("first", Role.STEP, "i32[1]"),
            Operand("image_rows", Role.STATE, "A[I+1,H]"),
        ),
        results=(Result("image_rows_out", updates="image_rows"),),
        attrs={"group": None},
        reference=reference,
        body=body,
    ),
    CANDIDATES,
)
