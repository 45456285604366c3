"""Drafts what followed the last tokens of a row's sequence where they were before.

The text of a row is the ids of its positions below starts + counts, in pages, and the slot's last
token behind them. A place matches by n ids if the n that end there are the n that end the text;
n counts up to MOST_MATCH, and an id below 0 equals none. The place with the most counts, the latest
of equal ones, if at least `least` match there. Its drafts are the K ids after it; where the text
ends the first of them follow again, so a repetition continues.

`held` is the number of drafts that the head made in this round. With some a match of fewer than
MOST_MATCH ids is only believed where its first draft is the head's. `matched` is the number of ids
of the match, 0 without one; then the slot keeps the head's drafts, and the others are 0. A row
without a token (slot −1, or count 0) changes no state.
"""

import numpy as np

from spark_engine.interface import MOST_MATCH
from spark_engine.named import Named
from spark_engine.op import Attrs, Op
from spark_engine.operand import Result
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.sequence_tiles import over, page_ids, read_rows
from spark_engine.plugins.kernels.drafts import match_drafts_kernels
from spark_engine.plugins.launch import serve
from spark_engine.plugins.ops.drafts import round_operands as rounds
from spark_engine.tensors import Array, DType, TensorSpec

OPERANDS = (
    rounds.ID_PAGES,
    operands.PAGE_TABLE,
    operands.LAST_TOKENS,
    rounds.DRAFTS,
    *operands.ROWS,
)
RESULTS = (Result("matched", "i32[rows]"), Result("drafts_out", "i32[S+1,K]", updates="drafts"))


def _check(node: Named) -> str | None:
    least, held, most = node.number("least"), node.number("held"), node.dim("K")
    if not 1 <= least <= MOST_MATCH:
        return f"least is {least}; a match has 1 to {MOST_MATCH} ids"
    return None if 0 <= held <= most else f"held is {held}; a slot has {most} drafts"


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """The operands -> (matched, drafts_out), row by row."""
    pages, table, last, drafts, slots, starts, counts = arrays
    drafts, matched, size = drafts.copy(), np.zeros_like(slots), pages.shape[2]
    held, most = int(attrs["held"]), drafts.shape[1]
    for row, slot in enumerate(slots):
        if slot < 0 or counts[row] == 0:
            continue
        end = int(starts[row] + counts[row])
        at = np.arange(end)
        text = [*pages[table[slot, at // size], 0, at % size, 0].tolist(), int(last[slot])]
        length, place = max([_match(text, i) for i in range(end)], default=(0, 0))
        following = [max(text[place + 1 + i % (end - place)], 0) for i in range(most if end else 0)]
        sure = length >= MOST_MATCH or not held or following[0] == drafts[slot, 0]
        if length >= int(attrs["least"]) and sure:
            matched[row], drafts[slot] = length, following
        else:
            drafts[slot, held:] = 0
    return matched, drafts


def _match(text: list[int], place: int) -> tuple[int, int]:
    """(ids that match at this place, the place)."""
    length, most = 0, min(MOST_MATCH, place + 1)
    while length < most and text[place - length] == text[-1 - length] >= 0:
        length += 1
    return length, place


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """The text against itself, moved by its end; a maximum over places; one ScatterND."""
    f, node = Text(), OP.named(attrs, specs)
    size, most = node.shape("page", "K")
    longest = node.dim("MP") * size
    rows = read_rows(f, "slots", "starts", "counts")
    end = over(f, f("Clip", f("Add", rows.starts, rows.counts), 0, longest), [1])  # [rows, 1]
    known = f("Gather", "id_pages", page_ids(f, rows, node.dim("P+1")))
    known = f("Pad", f("Reshape", known, [-1, longest]), [0, 0, 0, 1])
    places = np.arange(longest + 1)[None]
    last = over(f, f("Gather", "last_tokens", rows.slots), [1])
    text = f("Where", f("Equal", places, end), last, known)  # [rows, longest + 1]
    back = f("Sub", end, np.arange(MOST_MATCH)[None])
    key = f("GatherElements", text, f("Max", back, 0), axis=1)
    key = f("Where", f("GreaterOrEqual", back, 0), key, np.int32(-1))
    wide = f("Pad", text, [0, MOST_MATCH, 0, 0], np.int32(-1))
    running, length = f("Less", places, end), f("Expand", np.int32(0), [1, 1])
    for i in range(MOST_MATCH):  # `wide` moved by i ids; −1 equals none
        own, first = f("Slice", key, [i], [i + 1], [1]), MOST_MATCH - i
        moved = f("Slice", wide, [first], [first + longest + 1], [1])
        same = f("And", f("Equal", moved, own), f("GreaterOrEqual", own, np.int32(0)))
        running = f("And", running, same)
        length = f("Add", length, f.cast(running, DType.I32))
    enough = f("GreaterOrEqual", length, np.int32(node.number("least")))
    score = f("Add", f("Mul", f.long(length), longest + 1), places)
    best = f("ReduceMax", f("Where", enough, score, 0), [1], keepdims=1)
    total, place = f("Div", best, longest + 1), f("Mod", best, longest + 1)  # [rows, 1]
    period = f("Max", f("Sub", end, place), 1)
    at = f("Add", f("Add", place, 1), f("Mod", np.arange(most)[None], period))
    following = f("Max", f("GatherElements", text, f("Min", at, longest), axis=1), np.int32(0))
    state, held = f("Gather", "drafts", rows.slots), node.number("held")
    sure = f("GreaterOrEqual", total, MOST_MATCH if held else 0)
    if held:
        heads = (f("Slice", x, [0], [1], [1]) for x in (following, state))
        sure = f("Or", sure, f("Equal", *heads))
    live = over(f, f("Greater", rows.counts, 0), [1])
    taken = f("And", f("And", f("Greater", total, 0), sure), live)
    matched = f("Where", taken, total, 0)
    f.cast(f("Squeeze", matched, [1]), DType.I32, out="matched")
    kept = f("Where", (np.arange(most) < held)[None], state, np.int32(0))
    target = f("Where", live, over(f, rows.slots, [1]), -1)
    f("ScatterND", "drafts", target, f("Where", taken, following, kept), out="drafts_out")
    return f.function("match_drafts", OP.inputs, OP.outputs)


OP = serve(
    Op(
        name="match_drafts",
        operands=OPERANDS,
        results=RESULTS,
        attrs={"least": None, "held": None},
        check=_check,
        reference=reference,
        body=body,
    ),
    match_drafts_kernels.CANDIDATES,
)
