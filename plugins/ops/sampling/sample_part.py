"""A summary of a rank's share of a row's logits, from which all ranks sample the same token.

`part` f32 [rows, 2·top + 3·few + 4], few = min(FEW, the share): the `top` greatest raw logits and
their ids, descending; of the `few` greatest logits after bias, penalties and mask (ties: the lowest
ids) that logit, the id and the raw logit, by ascending id; the greatest raw logit, Σ e^(x −
greatest), 1 if every logit is finite (others count as 0), and the share's first logit. Ids are
exact in f32.

Greedy rows and rows with a top_k of up to `few` need nothing else. Other rows that draw are
`wanted`: they need all logits. `wanted` depends on the tables only, so all ranks agree on it.
"""

from dataclasses import replace

import numpy as np

from spark_engine.named import Named
from spark_engine.op import Attrs, Op
from spark_engine.operand import Result
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.ops.sampling import sample
from spark_engine.plugins.ops.sampling.sample_nodes import (
    FLOOR,
    MASKED,
    NEVER,
    Span,
    log_probabilities,
    parameters,
    penalised,
    sampled_rows,
    within_mask,
)
from spark_engine.tensors import Array, DType, TensorSpec

FEW = 64
MOST_IDS = 1 << 24  # ids are exact in f32 up to this


def few(share: int) -> int:
    """The number of candidates of a row in a rank's part."""
    return min(FEW, share)


def columns(attrs: Attrs, share: int) -> int:
    return 2 * int(attrs["top"]) + 3 * few(share) + 4


def _check(node: Named) -> str | None:
    share, ids = node.shape("V/ranks", "V")
    if ids > MOST_IDS:
        return f"{ids} ids; f32 counts up to {MOST_IDS}"
    top = node.number("top")
    return f"top is {top}; a rank has {share} ids" if top > share else None


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """The operands -> (part, wanted), row by row. Inert rows are zero, with a sum of 1."""
    logits, token_counts, sampling_f, sampling_i, ids, values, until, allow = arrays[:8]
    *steps, first = arrays[8:]
    rows, share = logits.shape
    start, top, size = int(first[0]), int(attrs["top"]), few(share)
    whole = share * int(attrs["ranks"])
    part = np.zeros((rows, columns(attrs, share)), np.float32)
    part[:, -3] = 1
    wanted = np.zeros(rows, np.int32)
    emits = np.ones(rows) if attrs.get("drafts", 0) else steps[3]
    for row, slot, position, drafts in sample.drawing(attrs, tuple(steps)):
        fine = np.isfinite(logits[row])
        clean = np.where(fine, logits[row], 0).astype(np.float64)
        order = np.argsort(-clean, kind="stable")[:top]
        counts = token_counts[slot] + 2 * np.bincount(drafts, minlength=whole)
        used = until[slot] > position
        padded = np.zeros(whole)
        padded[start : start + share] = clean
        bias = (ids[slot][used], values[slot][used])
        z = sample.penalised_row(padded, counts, sampling_f[slot], bias)
        z = np.clip(z, -FLOOR, FLOOR)
        z[int(attrs["vocab"]) :] = -FLOOR
        if int(sampling_i[slot][MASKED]) == 1:
            z[: int(attrs["vocab"])] = sample.masked(z[: int(attrs["vocab"])], allow[slot])
            z[int(attrs["vocab"]) :] = -np.inf
        own = np.where(np.isinf(z), NEVER, z)[start : start + share]
        held = np.sort(np.argsort(-own, kind="stable")[:size])
        end = (clean.max(), np.exp(clean - clean.max()).sum(), fine.all(), clean[0])
        pieces = (clean[order], order + start, own[held], held + start, clean[held], end)
        part[row] = np.concatenate(pieces)
        draws = sampling_f[slot, 0] > 0 and emits[row] > 0
        wanted[row] = draws and not 1 <= sampling_i[slot, 0] <= size
    return part, wanted


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """Two sorts of a few entries: by size, then by id."""
    f, vocab, share = Text(), int(attrs["vocab"]), OP.named(attrs, specs).dim("V/ranks")
    whole, size = share * int(attrs["ranks"]), few(share)
    start = f.long("first")
    span = Span(share, start)
    rows = sampled_rows(f, attrs)
    rows = replace(rows, token_counts=span.of(f, rows.token_counts))
    p = parameters(f, rows)
    finite = f("Equal", f("Sub", "logits", "logits"), 0.0)
    clean = f("Where", finite, "logits", 0.0)
    fine = f("ReduceMin", f.cast(finite, DType.I32), [1], keepdims=1)
    top = log_probabilities(f, clean, int(attrs["top"]))
    z = penalised(f, p, clean, vocab, span, whole)
    z = within_mask(f, p, z, vocab, span, whole)
    _, held = f.many(2, "TopK", z, [size])
    held, _ = f.many(2, "TopK", held, [size], largest=0)
    ids = [f.cast(f("Add", x, start), DType.F32) for x in (top.ids, held)]
    columns_of = (f("GatherElements", x, held, axis=1) for x in (z, clean))
    first = f("Slice", clean, [0], [1], [1])
    values, raw = columns_of
    pieces = (top.values, ids[0], values, ids[1], raw, top.largest, top.sum)
    f("Concat", *pieces, f.cast(fine, DType.F32), first, out="part", axis=1)
    bounded = f("And", f("Greater", p.top_k, 0), f("LessOrEqual", p.top_k, size))
    wanted = f("And", p.samples, f("Not", bounded))
    f("Squeeze", f.cast(wanted, DType.I32), [1], out="wanted")
    return f.function("sample_part", OP.names(attrs, len(specs)), ["part", "wanted"])


RESULTS = tuple(
    Result(name, f"{dtype}[{unit}{columns}]", when)
    for unit, when in (("rows", sample.ONE), ("tokens", sample.ALL))
    for name, dtype, columns in (("part", "f32", ",C"), ("wanted", "i32", ""))
)
OP = Op(
    name="sample_part",
    operands=sample.OPERANDS,
    results=RESULTS,
    attrs={"vocab": None, "top": None, "ranks": None, "drafts": 0, "tile": 1},
    dims={"C": lambda node: columns(node.attrs, node.dim("V/ranks"))},
    check=_check,
    reference=reference,
    body=body,
)
