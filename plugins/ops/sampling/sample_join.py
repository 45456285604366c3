"""The next token of each row from the parts of all ranks (`sample_part`).

The results equal those of `sample` over all logits: candidates are in ascending order of ids, so
sums along the ids run in the same order. Of `logits` only `wanted` rows are read.
"""

from dataclasses import replace

import numpy as np

from spark_engine.named import Named
from spark_engine.op import Attrs, Op
from spark_engine.operand import Operand, Role
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.sequence_tiles import over
from spark_engine.plugins.ops.sampling import philox, sample
from spark_engine.plugins.ops.sampling import sample_part as parts
from spark_engine.plugins.ops.sampling.sample_nodes import (
    Parameters,
    Span,
    parameters,
    penalised,
    sampled_rows,
    within_mask,
)
from spark_engine.tensors import Array, DType, TensorSpec

OPERANDS = (
    replace(operands.x("f32[rows,N·C]", name="parts"), when=sample.ONE),
    Operand("wanted", Role.ACTIVATION, "i32[rows]", sample.ONE),
    replace(operands.x("f32[tokens,N·C]", name="parts"), when=sample.ALL),
    Operand("wanted", Role.ACTIVATION, "i32[tokens]", sample.ALL),
    *(o for o in sample.OPERANDS if o.name != "first"),
)


def _columns(node: Named) -> int:
    """The columns of one rank's `part`."""
    return parts.columns(node.attrs, node.dim("V") // node.number("ranks"))


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """The operands -> the results, token by token."""
    joined, wanted, logits, *rest = arrays
    n, ranks, top = len(logits), int(attrs["ranks"]), int(attrs["top"])
    size = parts.few(logits.shape[1] // ranks)
    tokens, logprobs, ok = (np.zeros(n, t) for t in (np.int32, np.float32, np.int32))
    top_ids, top_logprobs = np.zeros((n, top), np.int32), np.zeros((n, top), np.float32)
    whole = sample.reference(attrs, (np.nan_to_num(logits), *rest))
    _, f, i4, *_ = rest
    steps = tuple(rest[7:])
    for row, slot, position, _ in sample.drawing(attrs, steps):
        shown = joined[row].reshape(ranks, -1).astype(np.float64)
        ends = np.cumsum([0, top, top, size, size, size, 4])
        pieces = [shown[:, a:b] for a, b in zip(ends, ends[1:], strict=False)]
        raw, raw_ids, z, ids, logit = (x.reshape(-1) for x in pieces[:5])
        tail = pieces[5]
        largest = tail[:, 0].max()
        log_sum = np.log((tail[:, 1] * np.exp(tail[:, 0] - largest)).sum())
        order = np.argsort(-raw, kind="stable")[:top]
        top_ids[row], top_logprobs[row] = raw_ids[order], raw[order] - largest - log_sum
        ok[row] = tail[:, 2].min()
        if wanted[row]:
            tokens[row] = whole[0][row]
            chosen = float(logits[row, tokens[row]])
        else:
            u = philox.uniform(position, [int(x) for x in i4[slot, 1:3]])
            at = sample.choose(z, f[slot], int(i4[slot, 0]), u)
            tokens[row], chosen = ids[at], logit[at]
        if not ok[row]:
            tokens[row], chosen = 0, tail[0, 3]
        logprobs[row] = chosen - largest - log_sum
    return sample.finished(attrs, (tokens, logprobs, top_ids, top_logprobs, ok), steps)


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """Whole rows are in an If: a launch without `wanted` rows computes over candidates only."""
    f, ranks, top = Text(), int(attrs["ranks"]), int(attrs["top"])
    whole = OP.named(attrs, specs).dim("V")
    size = parts.few(whole // ranks)
    rows = sampled_rows(f, attrs)
    p = parameters(f, rows)
    widths = np.asarray([top, top, size, size, size, 1, 1, 1, 1])
    shown = f("Reshape", "parts", [-1, ranks, int(widths.sum())])
    pieces = f.many(9, "Split", shown, widths, axis=2)
    raw, raw_ids, z, ids, logit = (f("Flatten", x, axis=1) for x in pieces[:5])
    largest, total, fine, first = (f("Squeeze", x, [2]) for x in pieces[5:])
    most = f("ReduceMax", largest, [1], keepdims=1)
    sums = f("Mul", f.double(total), f("Exp", f.double(f("Sub", largest, most))))
    log_sum = f.cast(f("Log", f("ReduceSum", sums, [1], keepdims=1)), DType.F32)
    values, at = f.many(2, "TopK", raw, [top])
    f.cast(f("GatherElements", raw_ids, at, axis=1), DType.I32, out="top_ids")
    f("Sub", f("Sub", values, most), log_sum, out="top_logprobs")
    fine = f("ReduceMin", fine, [1], keepdims=1)

    lacks = f("Equal", over(f, "wanted", [1]), np.int32(0))
    few = replace(p, samples=f("And", p.samples, lacks))
    greatest, greedy = f.many(2, "TopK", z, [1])
    at = sample.drawn(f, few, z, greatest, greedy, ranks * size)
    candidate = f.long(f("GatherElements", ids, at, axis=1))
    chosen, its = _whole(f, attrs, p, lacks, whole)
    chosen = f("Where", lacks, candidate, chosen)
    its = f("Where", lacks, f("GatherElements", logit, at, axis=1), its)
    good = f("Greater", fine, 0.5)
    if attrs.get("drafts", 0):
        good = f("And", p.live, good)
        fine = f("Where", p.live, fine, 0.0)
    chosen = f("Where", good, chosen, 0)
    its = f("Where", good, its, f("Slice", first, [0], [1], [1]))
    f("Squeeze", f("Sub", f("Sub", its, most), log_sum), [1], out="logprobs")
    f("Squeeze", f.cast(fine, DType.I32), [1], out="ok")
    sample.store_tokens(f, attrs, rows, chosen)
    made = [r.name for r in OP.made(attrs)]
    return f.function("sample_join", OP.names(attrs, len(specs)), made)


def _whole(f: Text, attrs: Attrs, p: Parameters, lacks: str, width: int) -> tuple[str, ...]:
    """(id int64, its raw logit f32) [rows,1] from all logits, for rows that have them."""
    vocab, span = int(attrs["vocab"]), Span(width)

    def then(g: Text) -> tuple[str, ...]:
        clean = g("Where", lacks, 0.0, "logits")
        finite = g("Equal", g("Sub", clean, clean), 0.0)
        clean = g("Where", finite, clean, 0.0)
        z = penalised(g, p, clean, vocab, span, width)
        z = within_mask(g, p, z, vocab, span, width)
        greatest, greedy = g.many(2, "TopK", z, [1])
        all_of = replace(p, samples=g("And", p.samples, g("Not", lacks)))
        id = sample.drawn(g, all_of, z, greatest, greedy, width)
        return id, g("GatherElements", clean, id, axis=1)

    def otherwise(g: Text) -> tuple[str, ...]:
        nothing = g("Sub", p.top_k, p.top_k)
        return nothing, g.cast(nothing, DType.F32)

    none = f.cast(f("ReduceMin", f.cast(lacks, DType.I32), [0, 1], keepdims=0), DType.BOOL)
    return f.many(2, "If", none, then_branch=f.graph(0, otherwise), else_branch=f.graph(0, then))


OP = Op(
    name="sample_join",
    operands=OPERANDS,
    results=sample.RESULTS,
    attrs={"vocab": None, "top": None, "ranks": None, "drafts": 0, "tile": 1},
    dims={"N": "ranks", "ranks": "1", "C": _columns},  # `logits` are of all ranks
    reference=reference,
    body=body,
)
