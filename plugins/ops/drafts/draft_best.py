"""The best id of a rank for the next draft of each row, for the exchange between ranks.

best = (the largest logit, its id, 0, 0); of equal logits the lowest id. NaN and ids from `vocab` on
are never taken; if no id is left, it is −1. Rows without a token are not read. Ids are exact in
f32. `draft_token` with `pairs` continues from the results of all ranks, side by side.
"""

import numpy as np
from numpy.typing import NDArray

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
        best[row, :2] = best_of(logits[row], ids, int(attrs["vocab"]))
    return (best,)


def best_of(logits: Array, ids: NDArray[np.int64], vocab: int) -> tuple[float, int]:
    """(the largest logit, the lowest id that has it), of ids from 0 to `vocab`; else (−∞, −1)."""
    legal = (ids >= 0) & (ids < vocab) & ~np.isnan(logits)
    if not legal.any():
        return -np.inf, -1
    largest = logits[legal].max()
    return largest, int(ids[legal][logits[legal] == largest].min())


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """The largest logit, then the lowest id that has it."""
    f, wide = Text(), int(OP.named(attrs, specs)["logits"].shape[1])
    ids = f("Add", f("Range", 0, wide, 1), f.long("first"))
    largest, id = best_nodes(f, "logits", over(f, ids, [0]), int(attrs["vocab"]))
    nothing = f("Sub", id, id)
    rest = f.cast(f("Concat", id, nothing, nothing, axis=1), DType.F32)
    f("Concat", largest, rest, out="best", axis=1)
    return f.function("draft_best", OP.inputs, OP.outputs)


def best_nodes(f: Text, logits: str, ids: str, vocab: int) -> tuple[str, str]:
    """`best_of` of each row, f32 and int64 [rows,1]; `ids` int64 [1 or rows, logits of a row]."""
    legal = f("And", f("GreaterOrEqual", ids, 0), f("Less", ids, vocab))
    legal = f("And", legal, f("Equal", logits, logits))
    known = f("Where", legal, logits, f("Div", -1.0, 0.0))  # −∞, which may be the largest
    largest = f("ReduceMax", known, [1], keepdims=1)
    best = f("And", legal, f("Equal", known, largest))
    id = f("ReduceMin", f("Where", best, ids, NO_ID), [1], keepdims=1)
    return largest, f("Where", f("Less", id, NO_ID), id, -1)


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
