"""The tokens and start position of each row of a round, from the host or the slot's states.

The first token of a row is the last sampled one; the others are drafts. Ids are the host's, or
`last_tokens[slot]` and `drafts[slot, j − 1]` if that is −1. The start is the host's position, or
`positions[slot]` if that is −1. Missing tokens have id 0, inert rows start at 0. `certain` is the
number of tokens of a row that are not drafts: 1, or 0 for a row without tokens.
"""

import numpy as np

from spark_engine.named import Named
from spark_engine.op import Attrs, Op
from spark_engine.operand import Result
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.sequence_tiles import over, read_rows, valid_tokens
from spark_engine.plugins.kernels.drafts import draft_rounds_kernels
from spark_engine.plugins.launch import serve
from spark_engine.plugins.ops.drafts import round_operands as rounds
from spark_engine.tensors import Array, DType, TensorSpec

OPERANDS = (
    operands.TOKEN_IDS,
    operands.LAST_TOKENS,
    rounds.DRAFTS,
    rounds.POSITIONS,
    *operands.ROWS,
)
RESULTS = (
    Result("ids", "i32[tokens]"),
    Result("row_starts", "i32[rows]"),
    Result("certain", "i32[rows]"),
)


def _check(node: Named) -> str | None:
    tile, held = node.number("tile"), node.dim("K")
    if held < tile - 1:
        return f"tile is {tile}; {held} drafts serve a tile of {held + 1}"
    return None


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """The operands -> (ids, row_starts, certain), row by row."""
    tokens, last, drafts, standing, slots, starts, counts = arrays
    ids = np.zeros((len(slots), int(attrs["tile"])), np.int32)
    given = tokens.reshape(ids.shape)
    begins, certain = np.zeros_like(slots), np.zeros_like(slots)
    for row, slot in enumerate(slots):
        if slot < 0:
            continue
        begins[row] = standing[slot] if starts[row] < 0 else starts[row]
        certain[row] = min(counts[row], 1)
        for j in range(counts[row]):
            known = last[slot] if j == 0 else drafts[slot, j - 1]
            ids[row, j] = known if given[row, j] < 0 else given[row, j]
    return ids.reshape(-1), begins, certain


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """The tokens of each slot's states side by side, then a choice for each token."""
    f, tile = Text(), int(attrs["tile"])
    rows = read_rows(f, "slots", "starts", "counts")
    known = over(f, f("Gather", "last_tokens", "slots"), [1])
    if tile > 1:
        first = f("Slice", f("Gather", "drafts", "slots"), [0], [tile - 1], [1])
        known = f("Concat", known, first, axis=1)  # [rows, tile]
    given = f("Reshape", "token_ids", [-1, tile])
    ids = f("Where", f("Less", given, np.int32(0)), known, given)
    ids = f("Where", valid_tokens(f, rows, tile), ids, np.int32(0))
    f("Reshape", ids, [-1], out="ids")
    standing = f("Gather", "positions", "slots")
    begins = f("Where", f("Less", "starts", np.int32(0)), standing, "starts")
    f("Where", rows.live, begins, np.int32(0), out="row_starts")
    f.cast(f("Min", rows.counts, 1), DType.I32, out="certain")
    return f.function("round_rows", OP.inputs, OP.outputs)


OP = serve(
    Op(
        name="round_rows",
        operands=OPERANDS,
        results=RESULTS,
        attrs={"tile": None},
        check=_check,
        reference=reference,
        body=body,
    ),
    draft_rounds_kernels.ROUND_ROWS,
)
