"""Accepts the drafts of a round that equal the target model's own samples.

next_tokens[j] is the token sampled after token j of the row. Token 0 is certain; draft j is
accepted if all drafts before it are and it equals next_tokens[j − 1]. accepted = 1 + the number of
accepted drafts, or 0 for a row without tokens. The op updates the slot's states: `token_counts`
counts the accepted drafts as generated, `last_tokens` is the token sampled after the last of them,
`positions` is its position, starts + accepted. `draft_starts` is the position before that, from
which drafting continues; 0 without tokens.
"""

import numpy as np

from spark_engine.op import Attrs, Op
from spark_engine.operand import Operand, Result, Role
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.sequence_tiles import over, read_rows
from spark_engine.plugins.kernels.drafts import draft_rounds_kernels
from spark_engine.plugins.launch import serve
from spark_engine.plugins.ops.drafts import round_operands as rounds
from spark_engine.tensors import Array, DType, TensorSpec

OPERANDS = (
    operands.x("i32[tokens]", name="next_tokens"),
    operands.x("i32[tokens]", name="ids"),
    Operand("token_counts", Role.STATE, "i32[S+1,V]"),
    operands.LAST_TOKENS,
    rounds.POSITIONS,
    *operands.ROWS,
)
RESULTS = (
    Result("accepted", "i32[rows]"),
    Result("draft_starts", "i32[rows]"),
    Result("token_counts_out", "i32[S+1,V]", updates="token_counts"),
    Result("last_tokens_out", "i32[S+1]", updates="last_tokens"),
    Result("positions_out", "i32[S+1]", updates="positions"),
)


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """The operands -> the results, row by row."""
    sampled, ids, token_counts, last, standing, slots, starts, counts = arrays
    token_counts, last, standing = token_counts.copy(), last.copy(), standing.copy()
    sampled, ids = (a.reshape(len(slots), int(attrs["tile"])) for a in (sampled, ids))
    accepted, draft_starts = np.zeros_like(slots), np.zeros_like(slots)
    for row, slot in enumerate(slots):
        if slot < 0 or counts[row] == 0:
            continue
        held = 1
        while held < counts[row] and ids[row, held] == sampled[row, held - 1]:
            token_counts[slot, ids[row, held]] += 2
            held += 1
        accepted[row], draft_starts[row] = held, starts[row] + held - 1
        last[slot], standing[slot] = sampled[row, held - 1], starts[row] + held
    return accepted, draft_starts, token_counts, last, standing


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """A running minimum over the matches, then three scatters; inert rows write the scratch row."""
    f, tile = Text(), int(attrs["tile"])
    rows = read_rows(f, "slots", "starts", "counts")
    sampled, ids = (f("Reshape", x, [-1, tile]) for x in ("next_tokens", "ids"))
    there = f("Less", np.arange(tile)[None], over(f, rows.counts, [1]))
    holds = there
    if tile > 1:
        before = f("Slice", sampled, [0], [tile - 1], [1])
        equal = f("Equal", f("Slice", ids, [1], [tile], [1]), before)
        first = f("Slice", there, [0], [1], [1])
        holds = f("And", there, f("Concat", f("Or", first, f("Not", first)), equal, axis=1))
    misses = f("CumSum", f.long(f("Not", holds)), 1)
    held = f("Equal", misses, 0)  # bool [rows, tile]: accepted
    total = f("ReduceSum", f.long(held), [1], keepdims=0)
    f.cast(total, DType.I32, out="accepted")
    some = f("Greater", total, 0)
    end = f("Add", rows.starts, total)
    f.cast(f("Where", some, f("Sub", end, 1), 0), DType.I32, out="draft_starts")
    target = over(f, f("Where", some, rows.slots, -1), [1])
    at = over(f, f("Max", f("Sub", total, 1), 0), [1])
    token = f("Squeeze", f("GatherElements", sampled, at, axis=1), [1])
    f("ScatterND", "last_tokens", target, token, out="last_tokens_out")
    f("ScatterND", "positions", target, f.cast(end, DType.I32), out="positions_out")
    generated = f("And", held, (np.arange(tile) > 0)[None])
    slot = f("Where", generated, target, -1)
    column = f("Where", generated, f.long(ids), 0)
    places = f("Concat", over(f, slot, [2]), over(f, column, [2]), axis=2)
    twos = f("Where", generated, np.int32(2), np.int32(0))
    f("ScatterND", "token_counts", places, twos, out="token_counts_out", reduction="add")
    return f.function("accept_drafts", OP.inputs, OP.outputs)


OP = serve(
    Op(
        name="accept_drafts",
        operands=OPERANDS,
        results=RESULTS,
        attrs={"tile": None},
        reference=reference,
        body=body,
    ),
    draft_rounds_kernels.ACCEPT_DRAFTS,
)
