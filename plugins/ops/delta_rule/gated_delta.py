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
token. Between launches the two may alternate. A chunk begins from the state and the ring of row
`sources` and leaves the state in its slot; where `saves` tells a row, the state behind that tile is
left there besides, and its ring says that nothing is pending. With `drafts` a step is a round of up
to `tile` tokens, of which the first is certain (see `round_ring`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spark_engine.interface import MOST_DRAFTS
from spark_engine.named import Named, Rules
from spark_engine.op import Attrs, Op
from spark_engine.operand import Completes, Operand, Result, Role, TimedLaunch, When
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.sequence_tiles import (
    state_rows,
)
from spark_engine.plugins.kernels.delta_rule import delta_decode_kernels
from spark_engine.plugins.kernels.delta_rule.prefill import delta_prefill_kernels
from spark_engine.plugins.launch import serve
from spark_engine.plugins.ops.delta_rule import gated_delta_body
from spark_engine.plugins.ops.delta_rule import gated_delta_cases as cases
from spark_engine.plugins.state import replay_ring
from spark_engine.plugins.state.replay_ring import Heads, Ring, heads_of, ring_of
from spark_engine.plugins.state.round_ring import Held
from spark_engine.tensors import Array, TensorSpec

Wide = NDArray[np.float64]
ATTRS = ("tile", "key_heads", "value_heads", "key_dim", "value_dim", "ring")
DEFAULTS: Attrs = {**dict.fromkeys(ATTRS), "drafts": 0}  # type: ignore[dict-item]


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
        completes=Completes("gdn_state", replay_ring.whole_state),
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
    return STEP if int(attrs["tile"]) <= 1 + MOST_DRAFTS else CHUNK


def whole_groups(node: Named) -> str | None:
    """Why value heads do not share key heads, or a row has too many tokens."""
    values, keys = node.shape("Hv", "Hk")
    if values % keys:
        return f"{values} value heads are no multiple of {keys} key heads"
    ring_of(node.attrs)  # raises for drafts that no ring holds
    tile, most = node.number("tile"), 1 + node.number("drafts")
    if most < tile <= 1 + MOST_DRAFTS:
        return f"a tile of {tile} tokens; a round has up to {most}"
    return None


def _ring(node: Named) -> Ring:
    found = ring_of(node.attrs)
    assert found is not None  # asked for by the ring's operand
    return found


DIMS: Rules = {
    **{"Hk": "key_heads", "Hv": "value_heads", "Dk": "key_dim", "Dv": "value_dim"},
    **{"L": lambda node: _ring(node).rows, "W": lambda node: _ring(node).width},
}


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """The operands -> (o, state_out, [ring_out]), token by token; both ops compute this."""
    h, ring = heads_of(attrs), ring_of(attrs)
    first = 6 if ring else 5
    c, ba, a_log, dt_bias, state, *rings = arrays[:first]
    slots, starts, counts, *told = arrays[first:]
    sources, saves = state_rows(slots, starts, told)
    if ring and ring.drafts and op_of(attrs) is STEP:
        return _rounds(h, ring, arrays)
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
            source = sources[row]
            wide[slot] = _found(ring, state[source], rings[0][source] if ring else None, start)
        s = wide[slot]
        for t in range(row * h.tile, row * h.tile + tokens):
            token = factors(h, c[t], ba[t], a_log, dt_bias)
            o[t], delta = advance(h, s, token)
            if ring and h.tile == 1:
                replay_ring.append(ring, new_rings[0][slot], start, (delta, token.k, token.g))
        if ring and h.tile > 1:
            _left(ring, new_rings[0][slot], start + tokens)
        folds = np.ones(state.shape[1:3], np.bool_)
        if ring and h.tile == 1 and start > 0:
            folds = ring.folds(start)
        new_state[slot, folds] = s[folds].astype(state.dtype)
        if saves[row] >= 0:
            new_state[saves[row]] = s.astype(state.dtype)
            if ring:
                _left(ring, new_rings[0][saves[row]], start + tokens)
    return o.reshape(len(c), -1).astype(c.dtype), new_state, *new_rings


def _found(ring: Ring | None, state: Array, records: Array | None, start: int) -> Wide:
    """The state that a slot has before position `start` > 0."""
    if ring is None or records is None:
        return np.asarray(state.astype(np.float64))
    if ring.drafts:
        return Held(ring, state, records, start).before(start)
    return replay_ring.caught_up(ring, state.astype(np.float64), records, start)


def _left(ring: Ring, records: Array, end: int) -> None:
    """Says in a slot's records that all before position `end` was folded."""
    records[-1 if ring.drafts else 0, -1 if not ring.drafts else slice(2 * ring.heads.values)] = end


def _rounds(h: Heads, ring: Ring, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """A step with drafts: what `reference` gives."""
    c, ba, a_log, dt_bias, state, records, slots, starts, counts = arrays
    o = np.zeros((len(c), h.values, h.value_dim))
    new_state, new_records = state.copy(), records.copy()
    for row, slot in enumerate(slots):
        if slot < 0 or counts[row] == 0:
            continue
        start, token = int(starts[row]), row * h.tile
        held = Held(ring, state[slot], records[slot], start)
        for p in range(start, start + int(counts[row])):
            t = factors(h, c[token], ba[token], a_log, dt_bias)
            o[token], delta = advance(h, held.before(p), t)
            held.append(p, delta, t.k, t.g)
            held.fold(p)
            if p == start:  # the later ones may be rejected
                new_state[slot] = held.state
            token += 1
        held.leave(start + 1, 1 if start == 0 else None)
        new_records[slot] = held.records
    return o.reshape(len(c), -1).astype(c.dtype), new_state, new_records


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
    """One token per row, S k and S q in one pass over the old state; with drafts up to `tile`."""
    f = Text()
    gated_delta_body.step_fragment(f, STEP.named(attrs, specs), ("state_out", "ring_out"))
    return _function(f, attrs)


def chunk_body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """All that needs no state is batched over tiles; a Scan carries the state through them."""
    f = Text()
    gated_delta_body.chunk_fragment(f, CHUNK.named(attrs, specs))
    return _function(f, attrs)


STEP = serve(
    Op(
        name="gated_delta_step",
        operands=OPERANDS,
        results=RESULTS,
        attrs=DEFAULTS,
        dims=DIMS,
        check=whole_groups,
        reference=reference,
        body=step_body,
        cases=cases.STEP,
    ),
    delta_decode_kernels.UNFUSED,
    called=delta_decode_kernels.STEP,
)

CHUNK = serve(
    Op(
        name="gated_delta_chunk",
        operands=(*OPERANDS, operands.SOURCES, operands.SAVES),
        results=RESULTS,
        attrs=DEFAULTS,
        dims=DIMS,
        check=whole_groups,
        reference=reference,
        body=chunk_body,
        cases=cases.CHUNK,
    ),
    delta_prefill_kernels.CANDIDATES,
)
