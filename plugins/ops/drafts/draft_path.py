"""One path through a block's candidates: the selector of DFlash2.

For each draft t of a row, in order: the score of candidate c is its logit plus
Σ_r predecessor[before, r] · query[t, r] · successor[c, r], where `before` is the draft before, and
for the first one the slot's last token. The candidate with the greatest score is the draft, the
first of equal ones. query [tokens,R] are of the block's tokens; the first of a row has no draft.
Draft t is column t − 1 of the slot's drafts; columns beyond the block's stay. Computed in f32. A
row without a token (slot −1, or count 0) changes no state. z-lab/dflash.
"""

import numpy as np

from spark_engine.named import Named
from spark_engine.op import Attrs, Op
from spark_engine.operand import Operand, Result, Role
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.sequence_tiles import over, read_rows
from spark_engine.plugins.kernels.drafts import block_kernels
from spark_engine.plugins.launch import serve
from spark_engine.plugins.ops.drafts import round_operands as rounds
from spark_engine.tensors import Array, DType, TensorSpec

OPERANDS = (
    Operand("ids", Role.ACTIVATION, "i32[tokens,top]", fill=operands.ids_of("successor")),
    operands.x("f32[tokens,top]", name="values"),
    operands.x("A[tokens,R]", name="query"),
    operands.weight("predecessor", "W[V,R]"),
    operands.weight("successor", "W[V,R]"),
    operands.LAST_TOKENS,
    rounds.DRAFTS,
    operands.SLOTS,
    operands.COUNTS,
)


def _check(node: Named) -> str | None:
    tile, held = node.number("tile"), node.dim("K")
    return f"a block of {tile} has {tile - 1} drafts, a slot {held}" if held < tile - 1 else None


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """The operands -> (drafts_out,), row by row."""
    ids, values, query, predecessor, successor, last, drafts, slots, counts = arrays
    drafts, tile = drafts.copy(), int(attrs["tile"])
    for row, slot in enumerate(slots):
        if slot < 0 or counts[row] == 0:
            continue
        before = int(last[slot])
        for t in range(1, tile):
            at = row * tile + t
            towards = predecessor[before].astype(np.float64) * query[at].astype(np.float64)
            scores = values[at] + successor[ids[at]].astype(np.float64) @ towards
            before = int(ids[at, int(np.argmax(scores))])
            drafts[slot, t - 1] = before
    return (drafts,)


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """A choice for each draft after the other."""
    f, node, tile = Text(), OP.named(attrs, specs), int(attrs["tile"])
    top, wide, held = node.shape("top", "R", "K")
    rows = read_rows(f, "slots", "slots", "counts")
    live = over(f, f("Greater", rows.counts, 0), [1])
    first = over(f, f.long(f("Gather", "last_tokens", rows.slots)), [1])
    before, made = f("Where", live, first, 0), []
    ids, values = (f("Reshape", x, [-1, tile, top]) for x in ("ids", "values"))
    query = f("Reshape", f.cast("query", DType.F32), [-1, tile, wide])
    for t in range(1, tile):
        own, logits, towards = (
            f("Squeeze", f("Slice", x, [t], [t + 1], [1]), [1]) for x in (ids, values, query)
        )
        prior = f("Squeeze", f.cast(f("Gather", "predecessor", before), DType.F32), [1])
        after = f.cast(f("Gather", "successor", own), DType.F32)  # [rows, top, R]
        product = f("MatMul", after, over(f, f("Mul", prior, towards), [2]))
        scores = f("Add", logits, f("Squeeze", product, [2]))
        best = f("ArgMax", scores, axis=1, keepdims=1)
        before = f("Where", live, f.long(f("GatherElements", own, best, axis=1)), 0)
        made.append(before)
    state = f("Gather", "drafts", rows.slots)
    found = f.cast(f("Concat", *made, axis=1), DType.I32)
    if held > tile - 1:
        found = f("Concat", found, f("Slice", state, [tile - 1], [held], [1]), axis=1)
    target = f("Where", live, over(f, rows.slots, [1]), -1)
    f("ScatterND", "drafts", target, found, out="drafts_out")
    return f.function("draft_path", OP.inputs, OP.outputs)


OP = serve(
    Op(
        name="draft_path",
        operands=OPERANDS,
        results=(Result("drafts_out", "i32[S+1,K]", updates="drafts"),),
        attrs={"tile": None},
        check=_check,
        reference=reference,
        body=body,
    ),
    block_kernels.PATH,
)
