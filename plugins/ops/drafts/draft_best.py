"""The best id of a rank for the next draft of each row, for the exchange between ranks.

best = (the largest logit, its id, 0, 0); of equal logits the lowest id. NaN and ids from `vocab` on
are never taken; if no id is left, it is −1. Rows without a token are not read. Ids are exact in
f32. `draft_token` with `pairs` continues from the results of all ranks, side by side.
"""

import numpy as np

from spark_engine.named import Named
from spark_engine.op import Attrs, Op
from spark_engine.operand import Operand, Result, Role
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.sequence_tiles import over
from spark_engine.plugins.kernels.drafts import draft_token_kernels
from spark_engine.plugins.launch import serve
from spark_engine.tensors import Array, DType, TensorSpec

WIDTH = 4  # values of `best`: ranks gather vectors of four
MOST_IDS = 1 << 24  # ids are exact in f32 up to this
NO_ID = 1 << 30


OPERANDS = (
    operands.x("f32[rows,V/ranks]", name="logits"),
    *operands.ROWS,
    Operand("first", Role.WEIGHT, "i32[1]", fill=operands.constant(0)),
)


def _check(node: Named) -> str | None:
    vocab = node.number("vocab")
    return f"{vocab} ids; f32 counts up to {MOST_IDS}" if vocab > MOST_IDS else None


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """The operands -> (best,), row by row."""
    logits, slots, _, counts, first = arrays
    ids = np.arange(logits.shape[1]) + int(first[0])
    best = np.zeros((len(logits), WIDTH), np.float32)
    for row, slot in enumerate(slots):
        if slot < 0 or counts[row] == 0:
            continue
        legal = (ids < int(attrs["vocab"])) & ~np.isnan(logits[row])
        best[row, :2] = -np.inf, -1
        if legal.any():
            largest = logits[row][legal].max()
            best[row, :2] = largest, ids[legal][logits[row][legal] == largest].min()
    return (best,)


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """The largest logit, then the lowest id that has it."""
    f, wide = Text(), OP.named(attrs, specs)["logits"].dims[1]
    ids = f("Add", f("Range", 0, wide, 1), f.long("first"))
    legal = f(
        "And", over(f, f("Less", ids, int(attrs["vocab"])), [0]), f("Equal", "logits", "logits")
    )
    least = f("Div", -1.0, 0.0)
    known = f("Where", legal, "logits", least)
    largest = f("ReduceMax", known, [1], keepdims=1)
    its = f("And", legal, f("Equal", known, largest))
    id = f("ReduceMin", f("Where", its, over(f, ids, [0]), NO_ID), [1], keepdims=1)
    id = f("Where", f("Less", id, NO_ID), id, -1)
    nothing = f("Sub", id, id)
    rest = f.cast(f("Concat", id, nothing, nothing, axis=1), DType.F32)
    f("Concat", largest, rest, out="best", axis=1)
    return f.function("draft_best", OP.inputs, OP.outputs)


OP = serve(
    Op(
        name="draft_best",
        operands=OPERANDS,
        results=(Result("best", "f32[rows,4]"),),
        attrs={"vocab": None},
        check=_check,
        reference=reference,
        body=body,
    ),
    draft_token_kernels.BEST,
)
