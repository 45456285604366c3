"""Stores the ids of a row's tokens in the slot's pages, by position.

An id that is not below `vocab` is an image's and stored as −1: it equals no id. A rejected token's
id is overwritten by the next at its position.
"""

import numpy as np

from spark_engine.op import Attrs, Op
from spark_engine.operand import Result
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.sequence_tiles import expand_rows, over, page_ids
from spark_engine.plugins.kernels.drafts import draft_rounds_kernels
from spark_engine.plugins.launch import serve
from spark_engine.plugins.ops.drafts import round_operands as rounds
from spark_engine.tensors import Array, TensorSpec

OPERANDS = (
    operands.x("i32[tokens]", name="ids"),
    rounds.ID_PAGES,
    operands.PAGE_TABLE,
    *operands.ROWS,
)


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """The operands -> (id_pages_out,), token by token."""
    ids, pages, table, slots, starts, counts = arrays
    pages, size, tile = pages.copy(), pages.shape[2], int(attrs["tile"])
    for row, slot in enumerate(slots):
        for j in range(counts[row] if slot >= 0 else 0):
            token, at = ids[row * tile + j], starts[row] + j
            known = 0 <= token < int(attrs["vocab"])
            pages[table[slot, at // size], 0, at % size, 0] = token if known else -1
    return (pages,)


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """One ScatterND; tokens that are not there go to the scratch page."""
    f, node = Text(), OP.named(attrs, specs)
    size, vocab = node.dim("page"), np.int32(node.number("vocab"))
    rows = expand_rows(f, node.number("tile"))
    at = over(f, f("Clip", rows.starts, 0, node.dim("MP") * size - 1), [1])  # [tokens, 1]
    page = f("GatherElements", page_ids(f, rows, node.dim("P+1")), f("Div", at, size), axis=1)
    page = f("Where", over(f, f("Greater", rows.counts, 0), [1]), page, -1)
    offset = f("Pad", f("Mod", at, size), [0, 1, 0, 1])
    places = f("Concat", page, offset, axis=1)
    known = f("And", f("GreaterOrEqual", "ids", np.int32(0)), f("Less", "ids", vocab))
    f("ScatterND", "id_pages", places, f("Where", known, "ids", np.int32(-1)), out="id_pages_out")
    return f.function("store_ids", OP.inputs, OP.outputs)


OP = serve(
    Op(
        name="store_ids",
        operands=OPERANDS,
        results=(Result("id_pages_out", updates="id_pages"),),
        attrs={"tile": None, "vocab": None},
        reference=reference,
        body=body,
    ),
    draft_rounds_kernels.STORE_IDS,
)
