"""Counts the launch's tokens into `token_counts`, for the sampling penalties.

token_counts[slot, id] = 2 · (times generated) + (1 if in the prompt). A token at a position below
`prompt_lens[slot]` counts as prompt. A tile at position 0 clears its slot's row first. An id of
V or above, a row of an image, is not counted.

The body rewrites whole rows, one for each sequence, so one scatter writes the state.
"""

import numpy as np

from spark_engine.interface import PREFILL_TILE
from spark_engine.kernel import Plan
from spark_engine.op import Attrs, Op
from spark_engine.operand import Operand, Result, Role
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.sequence_tiles import (
    Rows,
    final_slots,
    positions,
    read_rows,
    valid_tokens,
)
from spark_engine.plugins.kernels.common import row_quant as rq
from spark_engine.plugins.launch import Candidate, Kernel, Node, serve
from spark_engine.plugins.ops.rowwise.embed import resolved_ids, tile_of
from spark_engine.tensors import Array, TensorSpec

OPERANDS = (
    Operand("token_counts", Role.STATE, "i32[S+1,V]"),
    operands.TOKEN_IDS,
    operands.LAST_TOKENS,
    *operands.ROWS,
    Operand("prompt_lens", Role.TABLE, "i32[S+1]"),
)


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """The arrays of INPUTS -> (token_counts_out,)."""
    token_counts, tokens, last, slots, starts, counts, lens = arrays
    token_counts = token_counts.copy()
    for row, slot in enumerate(slots):
        if slot < 0:
            continue
        if starts[row] == 0:
            token_counts[slot] = 0
        for t in range(counts[row]):
            token = tokens[row * tile_of(attrs) + t]
            token = last[slot] if token < 0 else token
            if token >= token_counts.shape[1]:
                continue
            if starts[row] + t < lens[slot]:
                token_counts[slot, token] |= 1
            else:
                token_counts[slot, token] += 2
    return (token_counts,)


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """Gathers each sequence's row, adds its tokens, scatters the rows back."""
    f = Text()
    tile, vocab = tile_of(attrs), OP.named(attrs, specs).dim("V")
    rows = read_rows(f, "slots", "starts", "counts")
    own = f.indices("slots")
    counted_in = _counted_rows(f, rows, own) if tile > 1 else own
    clears = f("Equal", rows.starts, 0)
    if tile > 1:  # a later tile's row belongs to a fresh sequence if an earlier tile starts it
        hits = f("ScatterND", f("Mul", own, 0), f("Unsqueeze", counted_in, [1]),
                 f.long(clears), reduction="max")  # fmt: skip
        clears = f("Equal", hits, 1)
    old = f("Gather", "token_counts", "slots")  # [rows, V]
    base = f("Where", f("Unsqueeze", clears, [1]), np.int32(0), old)
    ids = f("Reshape", resolved_ids(f, attrs, vocab), [-1, tile])
    at = _indices(f, counted_in, ids, tile)
    known = f("Reshape", f("Less", "token_ids", np.int32(vocab)), [-1, tile])
    prompt, generated = _kinds(f, rows, tile, known)
    new = _add_tokens(f, base, at, prompt, generated)
    target = final_slots(f, rows) if tile > 1 else rows.slots
    f("ScatterND", "token_counts", f("Unsqueeze", target, [1]), new, out="token_counts_out")
    return f.function("mark_tokens", OP.inputs, ("token_counts_out",))


def _counted_rows(f: Text, rows: Rows, index: str) -> str:
    """int64 [rows]: the last tile of the same sequence, where all its tokens are counted; `index`:
    that of each."""
    same = f("Equal", f("Unsqueeze", rows.slots, [1]), f("Unsqueeze", rows.slots, [0]))
    wide = f("Unsqueeze", index, [0])
    own = f("Equal", f("Unsqueeze", index, [1]), wide)
    both = f("Or", f("And", same, f("Unsqueeze", rows.live, [1])), own)
    candidates = f("Where", both, wide, -1)
    return f("ReduceMax", candidates, [1], keepdims=0)


def _indices(f: Text, counted_in: str, ids: str, tile: int) -> str:
    """int64 [rows, tile, 2]: (row that counts it, id)."""
    wide = f("Expand", f("Unsqueeze", counted_in, [1, 2]), [1, tile, 1])
    return f("Concat", wide, f("Unsqueeze", ids, [2]), axis=2)


def _kinds(f: Text, rows: Rows, tile: int, known: str) -> tuple[str, str]:
    """bool [rows, tile] twice: a valid prompt token, a valid generated token; `known`: whether
    the id is one of the vocabulary."""
    valid = f("And", valid_tokens(f, rows, tile), known)
    lens = f("Unsqueeze", f.long(f("Gather", "prompt_lens", "slots")), [1])
    before = f("Less", positions(f, rows, tile), lens)
    return f("And", valid, before), f("And", valid, f("Not", before))


def _add_tokens(f: Text, base: str, at: str, prompt: str, generated: str) -> str:
    """The rows with bit 0 set by prompt tokens and 2 added by each generated one."""
    now = f("GatherND", base, at)
    odd = f("Mod", now, np.int32(2))
    raised = f("Where", prompt, f("Add", f("Sub", now, odd), np.int32(1)), now)
    marked = f("ScatterND", base, at, raised, reduction="max")
    twos = f("Where", generated, np.int32(2), np.int32(0))
    return f("ScatterND", marked, at, twos, reduction="add")


BLOCK = 256
DECODE_PARTS, PREFILL_PARTS = 4, 64
MARK = Kernel("mark", "token_counts_out token_ids last_tokens slots starts counts prompt_lens rows")


def _plan(node: Node) -> Plan:
    vocab, rows, tile = node.dim("V"), node.dim("rows"), node.number("tile")
    parts = PREFILL_PARTS if tile == PREFILL_TILE else DECODE_PARTS
    macros = {"VOCAB": vocab, "TILE": tile, "THREADS": BLOCK, "PARTS": parts}
    return node.plan(MARK.launch(node, (parts, rows), BLOCK, macros, rows=rows))


OP = serve(
    Op(
        name="mark_tokens",
        operands=OPERANDS,
        results=(Result("token_counts_out", "i32[S+1,V]", updates="token_counts"),),
        attrs={"tile": None},
        reference=reference,
        body=body,
    ),
    (Candidate("pieces", "sampling/mark_tokens_atomic.cu", _plan, lambda node: rq.LAUNCH_SECONDS),),
)
