"""Sampling: from logits to the next token of each row, its log-probability and the top ids.

Per row, with the slot's parameters: logits + bias; repetition (a seen token's positive logit is
divided, a negative one multiplied), frequency · count and presence, both of generated tokens only
(the order and meaning of vLLM); then, if temperature > 0: weights e^((z − max z) / temperature);
min_p drops weights below min_p · the largest; top_k keeps the k largest, top_p the shortest prefix
of those in descending order whose weight reaches top_p of theirs; ties go to the lower id. The
draw is the first id, in ascending order of ids over what is kept, whose cumulated weight exceeds
u · total, u from Philox at the new token's position. Temperature 0 takes the largest z.

ids ≥ `vocab` are never chosen, but they count in the raw log-probabilities. A row with a
non-finite logit gets ok = 0 and token 0. A row's result does not depend on the rows beside it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from spark_engine.op import Attrs, Op
from spark_engine.operand import Operand, Result, Role, TimedLaunch
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.sequence_tiles import expect_rows, over, read_rows
from spark_engine.plugins.common.shapes import count, expect
from spark_engine.plugins.sampling import philox, sample_cuda
from spark_engine.plugins.sampling import sample_cases as cases
from spark_engine.plugins.sampling.sample_nodes import (
    Parameters,
    draw,
    log_probabilities,
    parameters,
    penalised,
)
from spark_engine.tensors import Array, DType, TensorSpec


def _greedy(launch: TimedLaunch, dims: tuple[int, ...], rng: np.random.Generator) -> Array:
    row = np.zeros(dims[-1], np.float32)
    row[[1, 3]] = 1  # temperature 0, top_p and repetition 1
    return row


def _unused(launch: TimedLaunch, dims: tuple[int, ...], rng: np.random.Generator) -> Array:
    return np.full(dims, -1, np.int32)


def _emit(launch: TimedLaunch, dims: tuple[int, ...], rng: np.random.Generator) -> Array:
    return np.ones(dims, np.int32)


OPERANDS = (
    operands.x("f32[rows,V]", name="logits"),
    Operand("token_counts", Role.STATE, "i32[S+1,V]"),
    Operand("sampling_f", Role.TABLE, "f32[S+1,8]", fill=_greedy),
    Operand("sampling_i", Role.TABLE, "i32[S+1,4]"),
    Operand("bias_ids", Role.TABLE, "i32[S+1,NB]", fill=_unused),
    Operand("bias_values", Role.TABLE, "f32[S+1,NB]"),
    *operands.ROWS,
    Operand("emit", Role.STEP, "i32[rows]", fill=_emit),
    operands.LAST_TOKENS,
)
RESULTS = (
    Result("next_tokens", "i32[rows]"),
    Result("logprobs", "f32[rows]"),
    Result("top_ids", "i32[rows,top]"),
    Result("top_logprobs", "f32[rows,top]"),
    Result("ok", "i32[rows]"),
    Result("last_tokens_out", "i32[S+1]", updates="last_tokens"),
)
Wide = NDArray[np.float64]


def infer(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """The operands -> the results, as declared."""
    count("sample", specs, len(OPERANDS))
    logits, token_counts, sampling_f, sampling_i, bias_ids, bias_values, *steps, last = specs
    rows, (units, vocab) = expect_rows("sample", *steps), (token_counts.shape + (None, None))[:2]
    expect("sample", token_counts, (DType.I32,), (None, None))
    expect("sample", logits, (DType.F32,), (rows, vocab))
    expect("sample", sampling_f, (DType.F32,), (units, 8))
    expect("sample", sampling_i, (DType.I32,), (units, 4))
    expect("sample", bias_ids, (DType.I32,), (units, None))
    expect("sample", bias_values, (DType.F32,), bias_ids.shape)
    expect("sample", last, (DType.I32,), (units,))
    top = int(attrs["top"])
    return (
        TensorSpec("next_tokens", DType.I32, (rows,)),
        TensorSpec("logprobs", DType.F32, (rows,)),
        TensorSpec("top_ids", DType.I32, (rows, top)),
        TensorSpec("top_logprobs", DType.F32, (rows, top)),
        TensorSpec("ok", DType.I32, (rows,)),
        TensorSpec("last_tokens_out", DType.I32, last.shape),
    )


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """The operands -> the results, row by row. Inert rows are left zero."""
    logits, token_counts, sampling_f, sampling_i, bias_ids, bias_values, *steps, last = arrays
    rows, top = len(logits), int(attrs["top"])
    tokens, logprobs, ok = (np.zeros(rows, t) for t in (np.int32, np.float32, np.int32))
    top_ids, top_logprobs = np.zeros((rows, top), np.int32), np.zeros((rows, top), np.float32)
    last = last.copy()
    for row, (slot, start, n, emit) in enumerate(zip(*steps, strict=True)):
        if slot < 0:
            continue
        finite = np.isfinite(logits[row])
        ok[row] = finite.all()
        clean = np.where(finite, logits[row], 0).astype(np.float64)
        raw = clean - clean.max() - np.log(np.sum(np.exp(clean - clean.max())))
        top_ids[row] = np.argsort(-raw, kind="stable")[:top]
        top_logprobs[row] = raw[top_ids[row]]
        bias = (bias_ids[slot], bias_values[slot])
        z = _penalised(clean, token_counts[slot], sampling_f[slot], bias)[: int(attrs["vocab"])]
        u = philox.uniform(int(start + n), [int(x) for x in sampling_i[slot, 1:3]])
        tokens[row] = choose(z, sampling_f[slot], int(sampling_i[slot, 0]), u) if ok[row] else 0
        logprobs[row] = raw[tokens[row]]
        if emit > 0:
            last[slot] = tokens[row]
    return tokens, logprobs, top_ids, top_logprobs, ok, last


def _penalised(logits: Wide, token_counts: Array, f: Array, bias: tuple[Array, Array]) -> Wide:
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


def kept_weights(z: Wide, f: Array, top_k: int) -> Wide:
    """The weight of every id, zero where min_p, top_k or top_p drops it. temperature > 0."""
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
    """The id drawn with the uniform `u` from logits after bias and penalties."""
    if f[0] <= 0:
        return int(np.argmax(z))
    total = np.cumsum(kept_weights(z, f, top_k))
    return int(np.sum(total <= u * total[-1]))


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """The draw stands in an If: a launch without sampled rows costs no sort and no random bits."""
    f, vocab, n = Text(), int(attrs["vocab"]), specs[6].dims[0]
    rows = read_rows(f, "slots", "starts", "counts")
    p = parameters(f, rows)
    finite = f("Equal", f("Sub", "logits", "logits"), 0.0)
    clean = f("Where", finite, "logits", 0.0)
    fine = f("ReduceMin", f.cast(finite, DType.I32), [1], keepdims=1)
    top = log_probabilities(f, clean, int(attrs["top"]))
    z = penalised(f, p, clean, vocab, specs[0].dims[1])
    greatest, greedy = f.many(2, "TopK", z, [1])
    chosen = _drawn(f, p, z, greatest, greedy, specs[0].dims[1])
    chosen = f("Where", f.cast(fine, DType.BOOL), chosen, 0)  # [rows, 1]
    logit = f("GatherElements", clean, chosen, axis=1)
    f("Squeeze", f("Sub", f("Sub", logit, top.largest), top.log_sum), [1], out="logprobs")
    f.cast(top.ids, DType.I32, out="top_ids")
    f("Identity", top.logprobs, out="top_logprobs")
    f("Squeeze", fine, [1], out="ok")
    tokens = f("Identity", f.cast(f("Reshape", chosen, [n]), DType.I32), out="next_tokens")
    target = f("Where", p.emits, rows.slots, -1)
    f("ScatterND", "last_tokens", over(f, target, [1]), tokens, out="last_tokens_out")
    return f.function("sample", OP.inputs, OP.outputs)


def _drawn(f: Text, p: Parameters, z: str, greatest: str, greedy: str, width: int) -> str:
    """int64 [rows,1]: a drawn id where the row samples, the greedy one elsewhere."""

    def then(g: Text) -> tuple[str]:
        return (g("Where", p.samples, draw(g, p, z, greatest, width), greedy),)

    def otherwise(g: Text) -> tuple[str]:
        return (g("Identity", greedy),)

    anyone = f.cast(f("ReduceMax", f.cast(p.samples, DType.I32), [0, 1], keepdims=0), DType.BOOL)
    return f("If", anyone, then_branch=f.graph(0, then), else_branch=f.graph(0, otherwise))


OP = Op(
    name="sample",
    operands=OPERANDS,
    results=RESULTS,
    attrs={"vocab": None, "top": None},
    infer=infer,
    reference=reference,
    body=body,
    cases=cases.CASES,
    cuda=sample_cuda.CUDA,
)
