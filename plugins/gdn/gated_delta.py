"""The gated delta rule: a decode step and an exact chunked prefill (Yang et al., 2024; Qwen3.5).

Per value head h, key head ⌊h / (Hv/Hk)⌋, state S [Dv,Dk], all in f32:
    q ← q / sqrt(Σq² + 1e-6) / sqrt(Dk),   k ← k / sqrt(Σk² + 1e-6)
    β = sigmoid(b),   g = −exp(a_log) · softplus(a + dt_bias)
    S ← e^g · S;   δ = β · (v − S k);   S ← S + δ kᵀ;   o = S q
`c` holds q|k|v after the convolution, head-major; `ba` holds b then a.

The chunk form, for C tokens with G = cumsum(g), D[i,j] = e^(G_i − G_j) for j ≤ i, else 0:
    A = strict_lower(βK Kᵀ ⊙ D);  (I+A) U = βV;  (I+A) W = e^G βK
    V' = U − W Sᵀ;  O = e^G Q Sᵀ + (Q Kᵀ ⊙ D) V';  Sᵀ ← e^(G_C) Sᵀ + (e^(G_C − G) K)ᵀ V'
(I+A)⁻¹ comes from blocks of 1, 2, 4, … rows, each inverse made of two inverses half its size.
The Neumann product (I−A)(I+A²)(I+A⁴)… is exact too but not stable: with equal keys and β near 1
the powers of A reach 1e18 and cancel. G is summed in float64: small differences of large sums.

With attribute `ring` = L > 0 the stored state lags behind a replay ring of L records (see
`replay_ring`): a step appends the token's record and rewrites the rows whose turn it is, all at
position 0; a chunk rewrites all, its first tile from the ring, and moves `base` behind its last
token. Between launches the two may alternate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spark_engine.errors import GraphError
from spark_engine.op import Attrs, Op
from spark_engine.operand import Completes, Operand, Result, Role, TimedLaunch, When
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.sequence_tiles import (
    Rows,
    continuing,
    expect_rows,
    final_slots,
    over,
    read_rows,
    tokens_of,
)
from spark_engine.plugins.common.shapes import ACTIVATIONS, count, expect
from spark_engine.plugins.gdn import gated_delta_cases as cases
from spark_engine.plugins.gdn import gated_delta_cuda, gdn_decode_cuda, replay_ring_nodes
from spark_engine.plugins.gdn.gated_delta_nodes import Heads, heads_of, inverse, per_head, rates
from spark_engine.plugins.gdn.replay_ring import append, caught_up, ring_of, whole_state
from spark_engine.tensors import Array, DType, TensorSpec

Wide = NDArray[np.float64]
ATTRS = ("tile", "key_heads", "value_heads", "key_dim", "value_dim", "ring")


def _live(launch: TimedLaunch, dims: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Decays' logarithms and `base` are among it: neither grows, all is live."""
    drawn = rng.standard_normal(1 << 20, np.float32)
    return np.asarray(-np.abs(drawn) * np.float32(0.1))


OPERANDS = (
    operands.x("A[tokens,2·Hk·Dk+Hv·Dv]", name="c"),
    operands.x("A[tokens,2·Hv]", name="ba"),
    operands.weight("a_log", "f32[Hv]"),
    operands.weight("dt_bias", "f32[Hv]"),
    Operand("gdn_state", Role.STATE, "f32/bf16[S+1,Hv,Dv,Dk]"),
    Operand(
        "gdn_ring",
        Role.STATE,
        "f32[S+1,L,W]",
        When("ring"),
        completes=Completes("gdn_state", whole_state),
        fill=_live,
    ),
    *operands.ROWS,
)
RESULTS = (
    Result("o", "A[tokens,Hv·Dv]"),
    Result("state_out", "f32/bf16[S+1,Hv,Dv,Dk]", updates="gdn_state"),
    Result("ring_out", "f32[S+1,L,W]", When("ring"), updates="gdn_ring"),
)


def op_of(attrs: Attrs) -> Op:
    """The op that a tile belongs to."""
    return STEP if int(attrs["tile"]) == 1 else CHUNK


def infer(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """The operands -> (o A[tokens,Hv·Dv], state_out [S+1,Hv,Dv,Dk], [ring_out f32 [S+1,L,W]])."""
    op, h = op_of(attrs).name, heads_of(attrs)
    count(op, specs, len(op_of(attrs).given(attrs)))
    c, ba, a_log, dt_bias, state, *rings = specs[:-3]
    if h.values % h.keys:
        raise GraphError(f"{op}: {h.values} value heads are no multiple of {h.keys} key heads")
    tokens = tokens_of(op, expect_rows(op, *specs[-3:]), h.tile)
    expect(op, c, ACTIVATIONS, (tokens, h.width))
    expect(op, ba, ACTIVATIONS, (c.shape[0], 2 * h.values))
    for spec in (a_log, dt_bias):
        expect(op, spec, (DType.F32,), (h.values,))
    expect(op, state, (DType.F32, DType.BF16), (None, h.values, h.value_dim, h.key_dim))
    if ring := ring_of(attrs):
        expect(op, rings[0], (DType.F32,), (state.shape[0], ring.length, ring.width))
    return (
        TensorSpec("o", c.dtype, (c.shape[0], h.values * h.value_dim)),
        TensorSpec("state_out", state.dtype, state.shape),
        *(TensorSpec("ring_out", r.dtype, r.shape) for r in rings),
    )


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """The operands -> (o, state_out, [ring_out]), token by token; both ops compute this."""
    c, ba, a_log, dt_bias, state, *rings, slots, starts, counts = arrays
    h, ring = heads_of(attrs), ring_of(attrs)
    o = np.zeros((len(c), h.values, h.value_dim))
    new_state, new_rings = state.copy(), [records.copy() for records in rings]
    wide: dict[int, Wide] = {}  # float64 states of this launch, rounded once
    for row in range(len(slots)):
        slot, start, tokens = int(slots[row]), int(starts[row]), int(counts[row])
        if slot < 0 or (h.tile == 1 and tokens == 0 and start > 0):
            continue
        if start == 0:
            wide[slot] = np.zeros(state.shape[1:])  # whatever the slot holds
        elif slot not in wide:
            stored = state[slot].astype(np.float64)
            wide[slot] = caught_up(ring, stored, rings[0][slot], start) if ring else stored
        s = wide[slot]
        for t in range(row * h.tile, row * h.tile + tokens):
            token = factors(h, c[t], ba[t], a_log, dt_bias)
            o[t], delta = advance(h, s, token)
            if ring and h.tile == 1:
                append(ring, new_rings[0][slot], start, (delta, token.k, token.g))
        if ring and h.tile > 1:
            new_rings[0][slot, 0, -1] = start + tokens
        folds = np.ones(state.shape[1:3], np.bool_)
        if ring and h.tile == 1 and start > 0:
            folds = ring.folds(start)
        new_state[slot, folds] = s[folds].astype(state.dtype)
    return o.reshape(len(c), -1).astype(c.dtype), new_state, *new_rings


@dataclass(frozen=True)
class Factors:
    """What the rule takes of one token, float64; g is the logarithm of its decay."""

    q: Wide  # [Hk,Dk], normalised and scaled
    k: Wide  # [Hk,Dk], normalised
    v: Wide  # [Hv,Dv]
    beta: Wide  # [Hv]
    g: Wide  # [Hv]


def factors(h: Heads, token: Array, rate: Array, a_log: Array, dt_bias: Array) -> Factors:
    """From a row of c and one of ba."""
    c: Wide = token.astype(np.float64)
    b, a = rate.astype(np.float64).reshape(2, h.values)
    size = h.keys * h.key_dim
    q: Wide = c[:size].reshape(h.keys, -1)
    k: Wide = c[size : 2 * size].reshape(h.keys, -1)
    v: Wide = c[2 * size :].reshape(h.values, -1)
    q = q / np.sqrt(np.sum(q * q, axis=1, keepdims=True) + 1e-6) / np.sqrt(h.key_dim)
    k = k / np.sqrt(np.sum(k * k, axis=1, keepdims=True) + 1e-6)
    g = -np.exp(a_log.astype(np.float64)) * np.logaddexp(0, a + dt_bias.astype(np.float64))
    return Factors(q, k, v, 1 / (1 + np.exp(-b)), g)


def advance(h: Heads, s: Wide, t: Factors) -> tuple[Wide, Wide]:
    """Updates `s` [Hv,Dv,Dk] in place by one token; returns (o, δ), both [Hv,Dv]."""
    o, delta = np.zeros((h.values, h.value_dim)), np.zeros((h.values, h.value_dim))
    for head in range(h.values):
        key, query = t.k[head // h.repeat], t.q[head // h.repeat]
        s[head] *= np.exp(t.g[head])
        delta[head] = t.beta[head] * (t.v[head] - s[head] @ key)
        s[head] += np.outer(delta[head], key)
        o[head] = s[head] @ query
    return o, delta


def _function(f: Text, attrs: Attrs) -> str:
    """The op's body, of what was appended to `f`."""
    op = op_of(attrs)
    given, made = op.given(attrs), op.made(attrs)
    return f.function(op.name, [o.name for o in given], [r.name for r in made])


def step_body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """One token per row; S k and S q share one pass over the old state."""
    f = Text()
    step_fragment(f, attrs, specs, ("state_out", "ring_out"))
    return _function(f, attrs)


def step_fragment(
    f: Text, attrs: Attrs, specs: tuple[TensorSpec, ...], outs: Sequence[str]
) -> None:
    """The body over the operands' names, written to `o` and `outs` (the state, [the ring])."""
    h, ring = heads_of(attrs), ring_of(attrs)
    rows = read_rows(f, "slots", "starts", "counts")
    if ring is None:
        new = _step_terms(f, h, rows, specs, _old_state(f, rows)).state
    else:
        lag = replay_ring_nodes.catch_up(f, ring, rows, "gdn_state", "gdn_ring")
        step = _step_terms(f, h, rows, specs, lag.state)
        new = f("Where", replay_ring_nodes.folds(f, ring, rows), step.state, lag.stored)
    _store(f, rows.slots, f.cast(new, specs[4].dtype), outs[0])
    if ring is not None:
        replay_ring_nodes.append(f, ring, rows, lag, (step.delta, step.k, step.g), outs[1])


@dataclass(frozen=True)
class Step:
    """Names of what one token of every row makes, all f32."""

    state: str  # [rows,Hv,Dv,Dk]
    delta: str  # [rows,Hv,Dv]
    k: str  # [rows,Hv,Dk]
    g: str  # [rows,Hv,1], 0 where there is no token


def _step_terms(f: Text, h: Heads, rows: Rows, specs: tuple[TensorSpec, ...], state: str) -> Step:
    """The rule over the operands' names and the old `state` [rows,Hv,Dv,Dk]; writes `o`."""
    q, k, v = (_drop_token(f, x) for x in per_head(f, h, rows, specs[-1].dims[0]))
    beta, g = rates(f, h, rows, specs[-1].dims[0])  # [rows, Hv, 1]
    decay = f("Exp", g)
    both = f("Concat", over(f, k, [3]), over(f, q, [3]), axis=3)
    seen_k, seen_q = f.many(2, "Split", f("MatMul", state, both), axis=3, num_outputs=2)
    delta = f("Mul", beta, f("Sub", v, f("Mul", decay, f("Squeeze", seen_k, [3]))))
    dot = f("ReduceSum", f("Mul", k, q), [2], keepdims=1)
    o = f("Add", f("Mul", decay, f("Squeeze", seen_q, [3])), f("Mul", delta, dot))
    f.cast(f("Reshape", o, [-1, h.values * h.value_dim]), specs[0].dtype, out="o")
    outer = f("MatMul", over(f, delta, [3]), over(f, k, [2]))
    return Step(f("Add", f("Mul", state, over(f, decay, [3])), outer), delta, k, g)


def _drop_token(f: Text, x: str) -> str:
    """[rows, heads, 1, dim] -> [rows, heads, dim]."""
    return f("Squeeze", x, [2])


def _old_state(f: Text, rows: Rows) -> str:
    """f32 [rows, Hv, Dv, Dk]: zero for a fresh row, whatever its slot holds."""
    state = f.cast(f("Gather", "gdn_state", rows.slots), DType.F32)
    return f("Where", over(f, rows.fresh, [1, 2, 3]), 0.0, state)


def _store(f: Text, slots: str, new: str, out: str) -> None:
    f("ScatterND", "gdn_state", over(f, slots, [1]), new, out=out)


def chunk_body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """All that needs no state is batched over tiles; a Scan carries the state through them."""
    f, h, ring = Text(), heads_of(attrs), ring_of(attrs)
    rows, n = read_rows(f, "slots", "starts", "counts"), specs[-1].dims[0]
    if ring is None:
        _chunk_fragment(f, h, rows, specs, _old_state(f, rows))
    else:
        lag = replay_ring_nodes.catch_up(f, ring, rows, "gdn_state", "gdn_ring")
        _chunk_fragment(f, h, rows, specs, lag.state)
        end = f.cast(f("Add", rows.starts, rows.counts), DType.F32)
        # Never the old one; but the ring, which may be the output's memory, is read before this.
        inert = f("Less", rows.starts, 0)
        end = f("Where", inert, replay_ring_nodes.base_of(f, ring, lag.records), end)
        slots = final_slots(f, rows, n)
        replay_ring_nodes.store_base(f, ring, slots, "gdn_ring", end, "ring_out")
    return _function(f, attrs)


def _chunk_fragment(
    f: Text, h: Heads, rows: Rows, specs: tuple[TensorSpec, ...], state: str
) -> None:
    """The body over the operands' names and every row's old `state`, written to `o` and the
    state."""
    n = specs[-1].dims[0]
    q, k, v = per_head(f, h, rows, n)  # [rows, Hv, C, D]
    beta, g = rates(f, h, rows, n)  # [rows, Hv, C]
    inputs = _chunk_terms(f, h, q, k, v, over(f, beta, [3]), g)
    old = f("Transpose", state, perm=[0, 1, 3, 2])  # [rows, Hv, Dk, Dv]
    zero = np.zeros((), np.float32)
    start = f("Expand", zero, [h.values, h.key_dim, h.value_dim])
    scan = f.graph(9, _tile_step)
    _, o, states = f.many(
        3, "Scan", start, continuing(f, rows, n), old, *inputs, body=scan, num_scan_inputs=8
    )
    tokens = f("Transpose", o, perm=[0, 2, 1, 3])
    flat = f("Reshape", tokens, [n * h.tile, h.values * h.value_dim])
    f.cast(flat, specs[0].dtype, out="o")
    new = f.cast(f("Transpose", states, perm=[0, 1, 3, 2]), specs[4].dtype)
    _store(f, final_slots(f, rows, n), new, "state_out")


def _chunk_terms(
    f: Text, h: Heads, q: str, k: str, v: str, beta: str, g: str
) -> tuple[str, str, str, str, str, str]:
    """(U, W, Q Kᵀ ⊙ D, e^G Q, (e^(G_C − G) K)ᵀ, e^(G_C)), each [rows, Hv, …]."""
    sums = f("CumSum", f.double(g), 2)  # G, float64 [rows, Hv, C]
    last = f("Slice", sums, [h.tile - 1], [h.tile], [2])
    lower = np.tril(np.ones((h.tile, h.tile), np.float32))
    gaps = f.cast(f("Sub", over(f, sums, [3]), over(f, sums, [2])), DType.F32)
    decay = f("Mul", f("Exp", f("Where", lower.astype(np.bool_), gaps, 0.0)), lower)  # D
    grown = over(f, f("Exp", f.cast(sums, DType.F32)), [3])  # e^G
    tail = over(f, f("Exp", f.cast(f("Sub", last, sums), DType.F32)), [2])
    keys_t = f("Transpose", k, perm=[0, 1, 3, 2])
    scaled = f("Mul", k, beta)
    strict = f("Mul", decay, np.tril(lower, -1))
    solve = inverse(f, f("Mul", f("MatMul", scaled, keys_t), strict), h.tile)
    return (
        f("MatMul", solve, f("Mul", v, beta)),
        f("MatMul", solve, f("Mul", scaled, grown)),
        f("Mul", f("MatMul", q, keys_t), decay),
        f("Mul", q, grown),
        f("Mul", keys_t, tail),
        over(f, f("Exp", f.cast(last, DType.F32)), [3]),
    )


def _tile_step(f: Text, carry: str, goes_on: str, old: str, *terms: str) -> tuple[str, str, str]:
    """One tile of every head: (state to carry, O, the same state), states as Sᵀ [Hv, Dk, Dv]."""
    u, w, scores, queries, keys_t, decay = terms
    state = f("Where", goes_on, carry, old)
    values = f("Sub", u, f("MatMul", w, state))
    o = f("Add", f("MatMul", queries, state), f("MatMul", scores, values))
    new = f("Add", f("Mul", state, decay), f("MatMul", keys_t, values))
    return new, o, f("Identity", new)


STEP = Op(
    name="gated_delta_step",
    operands=OPERANDS,
    results=RESULTS,
    attrs=dict.fromkeys(ATTRS),
    infer=infer,
    reference=reference,
    body=step_body,
    cases=cases.STEP,
    cuda=gdn_decode_cuda.CUDA,
)

CHUNK = Op(
    name="gated_delta_chunk",
    operands=OPERANDS,
    results=RESULTS,
    attrs=dict.fromkeys(ATTRS),
    infer=infer,
    reference=reference,
    body=chunk_body,
    cases=cases.CHUNK,
    cuda=gated_delta_cuda.CUDA,
)
