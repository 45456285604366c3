"""The tokens of a block that a block drafter reads: the row's last token, then masks.

A block has as many tokens as the round had for its row (`round_ids`, of which nothing else is
read). It begins at the slot's position: its first token is the last sampled one, each other is
`mask`. `block_counts` are the tokens of a row's block: all, or 0 for a row without a token
(slot −1, or count 0), which has ids 0 and starts at 0.
"""

import numpy as np

from spark_engine.op import Attrs, Op
from spark_engine.operand import Result
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.sequence_tiles import over, read_rows
from spark_engine.plugins.kernels.drafts import draft_rounds_kernels
from spark_engine.plugins.launch import serve
from spark_engine.plugins.ops.drafts import round_operands as rounds
from spark_engine.tensors import Array, DType, TensorSpec

OPERANDS = (
    operands.x("i32[tokens]", "of the round: a block has as many tokens", "round_ids"),
    operands.LAST_TOKENS,
    rounds.POSITIONS,
    operands.SLOTS,
    operands.COUNTS,
)
RESULTS = (
    Result("ids", "i32[tokens]"),
    Result("block_starts", "i32[rows]"),
    Result("block_counts", "i32[rows]"),
)


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """(round_ids, last_tokens, positions, slots, counts) -> (ids, block_starts, block_counts)."""
    _, last, standing, slots, counts = arrays
    ids = np.zeros((len(slots), int(attrs["tile"])), np.int32)
    starts, sizes = np.zeros_like(slots), np.zeros_like(slots)
    for row, slot in enumerate(slots):
        if slot >= 0 and counts[row] > 0:
            ids[row] = int(attrs["mask"])
            ids[row, 0], starts[row], sizes[row] = last[slot], standing[slot], ids.shape[1]
    return ids.reshape(-1), starts, sizes


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """A gather of each state, and a choice for each token."""
    f, tile = Text(), int(attrs["tile"])
    rows = read_rows(f, "slots", "slots", "counts")
    live = f("Greater", rows.counts, 0)
    first = over(f, f("Gather", "last_tokens", rows.slots), [1])
    ids = f("Where", (np.arange(tile) == 0)[None], first, np.int32(int(attrs["mask"])))
    ids = f("Where", over(f, live, [1]), ids, np.int32(0))
    f("Reshape", ids, [-1], out="ids")
    starts = f("Gather", "positions", rows.slots)
    f("Where", live, starts, np.int32(0), out="block_starts")
    f.cast(f("Mul", f.long(live), tile), DType.I32, out="block_counts")
    return f.function("block_rows", OP.inputs, OP.outputs)


OP = serve(
    Op(
        name="block_rows",
        operands=OPERANDS,
        results=RESULTS,
        attrs={"tile": None, "mask": None},
        reference=reference,
        body=body,
    ),
    draft_rounds_kernels.BLOCK_ROWS,
)
