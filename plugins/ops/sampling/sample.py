"""Sampling: from logits to the next token of each row, its log-probability and the top ids.

Per row, with the slot's parameters: logits + bias; repetition (a seen token's positive logit is
divided, a negative one multiplied), frequency · count and presence, both of generated tokens only
(the order and meaning of vLLM); then, if temperature > 0: weights e^((z − max z) / temperature);
min_p drops weights below min_p · the largest; top_k keeps the k largest; top_p keeps the shortest
prefix of those, in descending order, with at least top_p of their weight; ties go to the lower id.
The draw is the first kept id, ascending, at which the cumulated weight exceeds u · total; u is
from Philox at the new token's position. Temperature 0 takes the largest z.

A bias applies to new tokens at positions below its `bias_until`. ids ≥ `vocab` are never chosen,
but count in the raw log-probabilities. In a slot with 1 in the last column of `sampling_i`, ids
with bit 0 in `allow` (bit i % 32 of word i // 32) are not chosen either; a mask has a bit for at
least one id below `vocab`. In other slots `allow` is not read. A row with a non-finite logit has ok
= 0 and token 0. A row's result does not depend on other rows.

With `drafts` 1 every token of a row samples, as if the row's tokens up to it had been decoded one
by one: the new token after token j has the position starts + j + 1, and ids[1 … j] of the row count
as generated in addition to `token_counts`. No state is updated; a missing token has token 0 and ok
0.

With `ranks` each rank has the logits of its share of the ids, from `first` on, and all ranks have
the results of one rank with all logits. Reference and body are those of one rank. For the CPU the
op is replaced by `sample_part` and `sample_join`.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from spark_engine.op import Attrs, Op
from spark_engine.operand import Operand, Result, Role, TimedLaunch, When
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.sequence_tiles import over
from spark_engine.plugins.kernels.sampling import sample_kernels
from spark_engine.plugins.launch import serve
from spark_engine.plugins.ops.sampling import philox
from spark_engine.plugins.ops.sampling.sample_nodes import (
    FLOOR,
    MASKED,
    Parameters,
    Sampled,
    Span,
    draw,
    log_probabilities,
    parameters,
    penalised,
    sampled_rows,
    within_mask,
)
from spark_engine.tensors import Array, DType, TensorSpec


def _greedy(launch: TimedLaunch, dims: tuple[int, ...], rng: np.random.Generator) -> Array:
    row = np.zeros(dims[-1], np.float32)
    row[[1, 3]] = 1  # temperature 0, top_p and repetition 1
    return row


ONE, ALL = When("drafts", (0,)), When("drafts")  # a row's last token samples, or all its tokens do
OPERANDS = (
    replace(operands.x("f32[rows,V/ranks]", name="logits"), when=ONE),
    replace(operands.x("f32[tokens,V/ranks]", name="logits"), when=ALL),
    Operand("token_counts", Role.STATE, "i32[S+1,V]"),
    Operand("sampling_f", Role.TABLE, "f32[S+1,8]", fill=_greedy),
    Operand("sampling_i", Role.TABLE, "i32[S+1,4]"),
    Operand("bias_ids", Role.TABLE, "i32[S+1,NB]", fill=operands.constant(-1)),
    Operand("bias_values", Role.TABLE, "f32[S+1,NB]"),
    Operand("bias_until", Role.TABLE, "i32[S+1,NB]"),
    Operand("allow", Role.TABLE, "u32[S+1,⌈V/32⌉]"),
    *operands.ROWS,
    Operand("emit", Role.STEP, "i32[rows]", ONE, fill=operands.constant(1)),
    replace(operands.LAST_TOKENS, when=ONE),
    Operand("ids", Role.ACTIVATION, "i32[tokens]", ALL),
    Operand("first", Role.WEIGHT, "i32[1]", When("ranks"), fill=operands.constant(0)),
)


def _made(unit: str, when: When) -> tuple[Result, ...]:
    return (
        Result("next_tokens", f"i32[{unit}]", when),
        Result("logprobs", f"f32[{unit}]", when),
        Result("top_ids", f"i32[{unit},top]", when),
        Result("top_logprobs", f"f32[{unit},top]", when),
        Result("ok", f"i32[{unit}]", when),
    )


RESULTS = (
    *_made("rows", ONE),
    Result("last_tokens_out", "i32[S+1]", ONE, updates="last_tokens"),
    *_made("tokens", ALL),
)
DIMS = {"ranks": lambda node: max(1, node.number("ranks"))}
Wide = NDArray[np.float64]


def _tile(attrs: Attrs) -> int:
    """The number of tokens of a row that sample."""
    return int(attrs.get("tile", 1))


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """The operands -> the results, token by token; those of inert rows are zero."""
    logits, token_counts, sampling_f, sampling_i, bias_ids, values, until, allow = arrays[:8]
    rows, top = len(logits), int(attrs["top"])
    tokens, logprobs, ok = (np.zeros(rows, t) for t in (np.int32, np.float32, np.int32))
    top_ids, top_logprobs = np.zeros((rows, top), np.int32), np.zeros((rows, top), np.float32)
    for row, slot, position, drafts in drawing(attrs, arrays[8:]):
        finite = np.isfinite(logits[row])
        ok[row] = finite.all()
        clean = np.where(finite, logits[row], 0).astype(np.float64)
        raw = clean - clean.max() - np.log(np.sum(np.exp(clean - clean.max())))
        top_ids[row] = np.argsort(-raw, kind="stable")[:top]
        top_logprobs[row] = raw[top_ids[row]]
        counts = token_counts[slot] + 2 * np.bincount(drafts, minlength=len(clean))
        used = until[slot] > position
        bias = (bias_ids[slot][used], values[slot][used])
        z = penalised_row(clean, counts, sampling_f[slot], bias)[: int(attrs["vocab"])]
        if sampling_i[slot, MASKED] == 1:
            z = masked(z, allow[slot])
        u = philox.uniform(position, [int(x) for x in sampling_i[slot, 1:3]])
        tokens[row] = choose(z, sampling_f[slot], int(sampling_i[slot, 0]), u) if ok[row] else 0
        logprobs[row] = raw[tokens[row]]
    return finished(attrs, (tokens, logprobs, top_ids, top_logprobs, ok), arrays[8:])


def finished(attrs: Attrs, made: tuple[Array, ...], steps: tuple[Array, ...]) -> tuple[Array, ...]:
    """The results: `made`, and without drafts `last_tokens` with the first of them."""
    if attrs.get("drafts", 0):
        return made
    slots, _, _, emit, last, *_ = steps
    last, tokens = last.copy(), made[0]
    for slot, token, emits in zip(slots, tokens, emit, strict=True):
        if slot >= 0 and emits > 0:
            last[slot] = token
    return (*made, last)


def drawing(attrs: Attrs, arrays: tuple[Array, ...]) -> Iterator[tuple[int, int, int, Array]]:
    """(row of logits, slot, the new token's position, drafts before it) of each sampled token."""
    slots, starts, counts, *rest = arrays
    nothing = np.zeros(0, np.int32)
    for row, (slot, start, n) in enumerate(zip(slots, starts, counts, strict=True)):
        if slot >= 0 and not attrs.get("drafts", 0):
            yield row, slot, int(start + n), nothing
        elif slot >= 0:
            ids = rest[0].reshape(len(slots), _tile(attrs))[row]
            for j in range(n):
                yield row * _tile(attrs) + j, slot, int(start) + j + 1, ids[1 : j + 1]


def penalised_row(logits: Wide, token_counts: Array, f: Array, bias: tuple[Array, Array]) -> Wide:
    z = logits.copy()
    for token, value in zip(*bias, strict=True):
        if token >= 0:
            z[token] += value
    _, _, _, repetition, presence, frequency = (float(x) for x in f[:6])
    generated = token_counts.astype(np.int64) // 2
    penalty = np.where(z > 0, 1 / repetition, repetition)
    z = np.where(token_counts.astype(np.int64) > 0, z * penalty, z)
    penalised_logits: Wide = z - frequency * generated - presence * (generated > 0)
    return penalised_logits


def masked(z: Wide, words: Array) -> Wide:
    """z with −∞ for ids with bit 0; other ids are clamped to finite values."""
    bits = np.unpackbits(words.astype("<u4").view(np.uint8), bitorder="little")[: len(z)]
    return np.where(bits == 1, np.maximum(z, -FLOOR), -np.inf)


def kept_weights(z: Wide, f: Array, top_k: int) -> Wide:
    """The weight of every id, zero if min_p, top_k or top_p drops it; for temperature > 0."""
    temperature, top_p, min_p = (float(x) for x in f[:3])
    weights: Wide = np.exp((z - z.max()) / temperature)
    weights[weights < min_p] = 0
    order = np.argsort(-weights, kind="stable")
    if top_k > 0:
        weights[order[top_k:]] = 0
    if top_p < 1:
        before = np.cumsum(weights[order]) - weights[order]
        beyond = before >= top_p * weights.sum()
        beyond[0] = False
        weights[order[beyond]] = 0
    return weights


def choose(z: Wide, f: Array, top_k: int, u: float) -> int:
    """The id drawn with the uniform `u` from logits z after bias and penalties."""
    if f[0] <= 0:
        return int(np.argmax(z))
    total = np.cumsum(kept_weights(z, f, top_k))
    return int(np.sum(total <= u * total[-1]))


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """The draw is in an If: a launch without sampled rows sorts nothing."""
    f, vocab = Text(), int(attrs["vocab"])
    width = OP.named(attrs, specs).dim("V/ranks")
    rows = sampled_rows(f, attrs)
    p = parameters(f, rows)
    finite = f("Equal", f("Sub", "logits", "logits"), 0.0)
    clean = f("Where", finite, "logits", 0.0)
    fine = f("ReduceMin", f.cast(finite, DType.I32), [1], keepdims=1)
    top = log_probabilities(f, clean, int(attrs["top"]))
    span = Span(width)
    z = within_mask(f, p, penalised(f, p, clean, vocab, span, width), vocab, span, width)
    greatest, greedy = f.many(2, "TopK", z, [1])
    chosen = drawn(f, p, z, greatest, greedy, width)
    chosen = f("Where", f.cast(fine, DType.BOOL), chosen, 0)  # [rows, 1]
    if attrs.get("drafts", 0):
        chosen = f("Where", p.live, chosen, 0)
        fine = f("Where", p.live, fine, np.int32(0))
    logit = f("GatherElements", clean, chosen, axis=1)
    f("Squeeze", f("Sub", f("Sub", logit, top.largest), top.log_sum), [1], out="logprobs")
    f.cast(top.ids, DType.I32, out="top_ids")
    f("Identity", top.logprobs, out="top_logprobs")
    f("Squeeze", fine, [1], out="ok")
    store_tokens(f, attrs, rows, chosen)
    made = [r.name for r in OP.made(attrs)]
    return f.function("sample", OP.names(attrs, len(specs)), made)


def store_tokens(f: Text, attrs: Attrs, rows: Sampled, chosen: str) -> None:
    """Writes the ids `chosen` [rows,1] to `next_tokens` and, without drafts, `last_tokens_out`."""
    tokens = f("Identity", f.cast(f("Reshape", chosen, [-1]), DType.I32), out="next_tokens")
    if not attrs.get("drafts", 0):
        target = f("Where", rows.emits, rows.slots, -1)
        f("ScatterND", "last_tokens", over(f, target, [1]), tokens, out="last_tokens_out")


def drawn(f: Text, p: Parameters, z: str, greatest: str, greedy: str, width: int) -> str:
    """int64 [rows,1]: a drawn id if the row samples, else the greedy one."""

    def then(g: Text) -> tuple[str]:
        return (g("Where", p.samples, draw(g, p, z, greatest, width), greedy),)

    def otherwise(g: Text) -> tuple[str]:
        return (g("Identity", greedy),)

    any_row = f.cast(f("ReduceMax", f.cast(p.samples, DType.I32), [0, 1], keepdims=0), DType.BOOL)
    return f("If", any_row, then_branch=f.graph(0, then), else_branch=f.graph(0, otherwise))


OP = serve(
    Op(
        name="sample",
        operands=OPERANDS,
        results=RESULTS,
        attrs={"vocab": None, "top": None, "drafts": 0, "tile": 1, "ranks": 0},
        dims=DIMS,
        reference=reference,
        body=body,
    ),
    sample_kernels.CANDIDATES,
)
