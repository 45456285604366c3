"""The token after each token of a launch: an input of a draft head.

Within a row it is the next token. After the row's last token it is the host's `next_ids`, or if
that is −1 the token `sampled` there by this launch. Missing tokens have id 0.
"""

import numpy as np

from spark_engine.op import Attrs, Op
from spark_engine.operand import Operand, Result, Role
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.sequence_tiles import over
from spark_engine.plugins.kernels.drafts import draft_rounds_kernels
from spark_engine.plugins.launch import serve
from spark_engine.tensors import Array, TensorSpec

OPERANDS = (
    operands.TOKEN_IDS,
    Operand("next_ids", Role.STEP, "i32[rows]", fill=operands.constant(-1)),
    operands.x("i32[rows]", name="sampled"),
    operands.COUNTS,
)


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """(token_ids, next_ids, sampled, counts) -> (ids,)."""
    tokens, next_ids, sampled, counts = arrays
    ids = np.zeros((len(counts), int(attrs["tile"])), np.int32)
    given = tokens.reshape(ids.shape)
    for row, n in enumerate(counts):
        if n > 0:
            ids[row, : n - 1] = given[row, 1:n]
            ids[row, n - 1] = sampled[row] if next_ids[row] < 0 else next_ids[row]
    return (ids.reshape(-1),)


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """A shift to the left by a column, and a choice for each token."""
    f, tile = Text(), int(attrs["tile"])
    given = f("Reshape", "token_ids", [-1, tile])
    behind = f("Pad", f("Slice", given, [1], [tile], [1]), [0, 0, 0, 1])
    final = f("Where", f("Less", "next_ids", np.int32(0)), "sampled", "next_ids")
    left = f("Sub", over(f, f.long("counts"), [1]), np.arange(1, tile + 1)[None])  # behind it
    ids = f("Where", f("Greater", left, 0), behind, np.int32(0))
    ids = f("Where", f("Equal", left, 0), over(f, final, [1]), ids)
    f("Reshape", ids, [-1], out="ids")
    return f.function("shift_ids", OP.inputs, OP.outputs)


OP = serve(
    Op(
        name="shift_ids",
        operands=OPERANDS,
        results=(Result("ids", "i32[tokens]"),),
        attrs={"tile": None},
        reference=reference,
        body=body,
    ),
    draft_rounds_kernels.SHIFT_IDS,
)
