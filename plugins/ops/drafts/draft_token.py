"""The next draft of each row: the id of the largest logit, and the next position.

With a `shortlist` the logits are of its ids; with `pairs` a row has that many (logit, id, 0, 0) of
`draft_best`. Of equal logits the lowest id is taken; NaN and ids from `vocab` on never are; if no
id is left, the result is 0. Column `index` of the slot's drafts becomes the token, and next_starts
= starts + 1. A row without a token (slot −1, or count 0) has results 0 and changes no state.
"""

import numpy as np

from spark_engine.named import Named
from spark_engine.op import Attrs, Op
from spark_engine.operand import Operand, Result, Role, TimedLaunch, When
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.sequence_tiles import over, read_rows
from spark_engine.plugins.kernels.drafts import draft_token_kernels
from spark_engine.plugins.launch import serve
from spark_engine.plugins.ops.drafts import round_operands as rounds
from spark_engine.plugins.ops.drafts.draft_best import best_nodes, best_of
from spark_engine.tensors import Array, DType, TensorSpec


def ascending(launch: TimedLaunch, dims: tuple[int, ...], rng: np.random.Generator) -> Array:
    return np.arange(dims[0], dtype=np.int32)


OPERANDS = (
    operands.x("f32[rows,Vd]", name="logits"),
    Operand("shortlist", Role.WEIGHT, "i32[Vd]", When("shortlist"), fill=ascending),
    rounds.DRAFTS,
    *operands.ROWS,
)
RESULTS = (
    Result("token", "i32[rows]"),
    Result("next_starts", "i32[rows]"),
    Result("drafts_out", "i32[S+1,K]", updates="drafts"),
)


def _check(node: Named) -> str | None:
    index, held = node.number("index"), node.dim("K")
    return None if 0 <= index < held else f"index is {index}; a slot has {held} drafts"


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """The operands -> (token, next_starts, drafts_out), row by row."""
    logits, *shortlist, drafts, slots, starts, counts = arrays
    pairs = int(attrs.get("pairs", 0))
    known = np.asarray(shortlist[0] if shortlist else range(logits.shape[1]), np.int64)
    drafts, tokens, ends = drafts.copy(), np.zeros_like(slots), np.zeros_like(slots)
    for row, slot in enumerate(slots):
        if slot < 0 or counts[row] == 0:
            continue
        ids, values = known, logits[row]
        if pairs:
            values, ids = values[::4], values[1::4].astype(np.int64)
        tokens[row] = max(best_of(values, ids, int(attrs["vocab"]))[1], 0)
        ends[row] = starts[row] + 1
        drafts[slot, int(attrs["index"])] = tokens[row]
    return tokens, ends, drafts


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """The largest logit, then the lowest id that has it."""
    f, wide, index = Text(), OP.named(attrs, specs).dim("Vd"), int(attrs["index"])
    rows = read_rows(f, "slots", "starts", "counts")
    logits = "logits"
    if int(attrs.get("pairs", 0)):
        logits = f("Slice", "logits", [0], [wide], [1], [4])
        ids = f.long(f("Slice", "logits", [1], [wide], [1], [4]))  # [rows, pairs]
    else:
        ids = f.long("shortlist") if int(attrs["shortlist"]) else f("Range", 0, wide, 1)
        ids = over(f, ids, [0])
    token = f("Squeeze", best_nodes(f, logits, ids, int(attrs["vocab"]))[1], [1])
    live = f("Greater", rows.counts, 0)
    token = f("Where", live, f("Max", token, 0), 0)
    tokens = f.cast(token, DType.I32, out="token")
    f.cast(f("Where", live, f("Add", rows.starts, 1), 0), DType.I32, out="next_starts")
    slot = over(f, f("Where", live, rows.slots, -1), [1])
    places = f("Concat", slot, f("Add", f("Mul", slot, 0), index), axis=1)
    f("ScatterND", "drafts", places, tokens, out="drafts_out")
    return f.function("draft_token", OP.names(attrs, len(specs)), OP.outputs)


OP = serve(
    Op(
        name="draft_token",
        operands=OPERANDS,
        results=RESULTS,
        attrs={"index": None, "shortlist": 0, "vocab": None, "pairs": 0},
        check=_check,
        reference=reference,
        body=body,
    ),
    draft_token_kernels.CANDIDATES,
)
