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
from spark_engine.op import Attrs, Case, Op
from spark_engine.operand import Operand, Result, Role, TimedLaunch
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.random_arrays import normal
from spark_engine.plugins.common.sequence_tiles import over, read_rows
from spark_engine.plugins.kernels.drafts import block_kernels
from spark_engine.plugins.launch import serve
from spark_engine.plugins.ops.drafts import round_operands as rounds
from spark_engine.plugins.ops.drafts.round_operands import UNITS, WILD, Round
from spark_engine.tensors import Array, DType, TensorSpec


def _any(launch: TimedLaunch, dims: tuple[int, ...], rng: np.random.Generator) -> Array:
    return np.asarray(rng.integers(0, launch.specs["successor"].dims[0], dims), np.int32)


OPERANDS = (
    Operand("ids", Role.ACTIVATION, "i32[tokens,top]", fill=_any),
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
    n, top, wide, held = node.dim("rows"), node.dim("top"), node.dim("R"), node.dim("K")
    rows = read_rows(f, "slots", "slots", "counts")
    live = over(f, f("Greater", rows.counts, 0), [1])
    first = over(f, f.long(f("Gather", "last_tokens", rows.slots)), [1])
    before, made = f("Where", live, first, 0), []
    ids, values = (f("Reshape", x, [n, tile, top]) for x in ("ids", "values"))
    query = f("Reshape", f.cast("query", DType.F32), [n, tile, wide])
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


def _case(given: Round, r: int, top: int, dtype: DType = DType.F32, held: int = 0) -> Case:
    vocab = 40

    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        tokens = given.rows * given.tile
        ids = np.stack([rng.permutation(vocab)[:top] for _ in range(tokens)]).astype(np.int32)
        values = np.asarray(-np.sort(-rng.standard_normal((tokens, top))), np.float32)
        values[:, top - 1] = -np.inf
        query = normal(rng, tokens, r, dtype=dtype)
        books = [normal(rng, vocab, r, dtype=dtype) for _ in range(2)]
        last = np.asarray(rng.integers(0, vocab, UNITS + 1), np.int32)
        drafts = np.full((UNITS + 1, held or max(given.tile - 1, 1)), -WILD, np.int32)
        slots, _, counts = given.rows_of(np.zeros(given.rows))
        for row, slot in enumerate(given.slots):
            if slot < 0 or given.counts[row] == 0:
                values.reshape(given.rows, -1)[row] = np.nan
                query.reshape(given.rows, -1)[row] = np.nan
                last[slot] = WILD
        return ids, values, query, *books, last, drafts, slots, counts

    label = f"{rounds.label(given)}, {top} of rank {r}, {dtype}"
    return Case(label, {"tile": given.tile}, make, ignore=_without_scratch)


def _without_scratch(outputs: tuple[Array, ...]) -> None:
    outputs[0][-1] = 0


_BLOCKS = Round(8, (3, -1, 0, 6, 5), (8, 0, 8, 8, 0))
OP = serve(
    Op(
        name="draft_path",
        operands=OPERANDS,
        results=(Result("drafts_out", "i32[S+1,K]", updates="drafts"),),
        attrs={"tile": None},
        check=_check,
        reference=reference,
        body=body,
        cases=(
            _case(rounds.ALONE, 32, 16),
            _case(_BLOCKS, 64, 16),
            _case(_BLOCKS, 256, 16, DType.BF16),
            _case(Round(2, (1, 4, -1), (2, 2, 0)), 8, 5, held=7),
            _case(rounds.INERT, 16, 4),
        ),
    ),
    block_kernels.PATH,
)
