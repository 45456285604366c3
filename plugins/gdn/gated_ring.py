"""The gated delta rule over a state that lags behind: gated_delta with a replay ring.

The maths are those of `gated_delta`; what differs is where the state stands (see `replay_ring`). A
step reads the stored state and the ring, appends the token's record and folds the groups whose
turn it is; a step at position 0 folds all. A chunk folds everything, its first tile from the ring,
and leaves `base` at the position behind its last token. Between launches the two may alternate.
"""

from __future__ import annotations

import numpy as np

from spark_engine.kernel import Cuda
from spark_engine.op import Attrs, Body, Case, Op
from spark_engine.operand import Operand, Result, Role, TimedLaunch
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.sequence_tiles import final_slots, read_rows
from spark_engine.plugins.common.shapes import count, expect
from spark_engine.plugins.gdn import (
    gated_delta,
    gated_delta_cuda,
    gated_ring_cases,
    gdn_decode_cuda,
)
from spark_engine.plugins.gdn import replay_ring_nodes as nodes
from spark_engine.plugins.gdn.gated_delta_nodes import Heads, heads_of
from spark_engine.plugins.gdn.replay_ring import Ring, Wide, caught_up, ring_of
from spark_engine.tensors import Array, DType, TensorSpec


def _live(launch: TimedLaunch, dims: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Decays' logarithms and `base` are among it: neither grows, all is live."""
    drawn = rng.standard_normal(1 << 20, np.float32)
    return np.asarray(-np.abs(drawn) * np.float32(0.1))


GDN_RING = Operand("gdn_ring", Role.STATE, "f32[S+1,L,W]", fill=_live)
OPERANDS = (*gated_delta.OPERANDS[:5], GDN_RING, *operands.ROWS)
RESULTS = (*gated_delta.RESULTS, Result("ring_out", "f32[S+1,L,W]", updates="gdn_ring"))
INPUTS, OUTPUTS = tuple(o.name for o in OPERANDS), tuple(r.name for r in RESULTS)
ATTRS = (*gated_delta.ATTRS, "ring")
RING = 5  # operand


def name_of(attrs: Attrs) -> str:
    """The op a tile belongs to."""
    return "gated_delta_ring_step" if int(attrs["tile"]) == 1 else "gated_delta_ring_chunk"


def without(operands: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """The operands of gated_delta."""
    return (*operands[:RING], *operands[RING + 1 :])


def infer(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """The operands of INPUTS -> (o A[tokens,Hv·Dv], state_out [S+1,Hv,Dv,Dk], ring_out f32
    [S+1,L,width])."""
    op = name_of(attrs)
    count(op, specs, len(INPUTS))
    o, state = gated_delta.infer(attrs, without(specs))
    ring = ring_of(op, int(attrs["ring"]), heads_of(attrs))
    expect(op, specs[RING], (DType.F32,), (state.shape[0], ring.length, ring.width))
    return (o, state, TensorSpec("ring_out", DType.F32, specs[RING].shape))


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """The arrays of INPUTS -> (o, state_out, ring_out)."""
    ring = ring_of(name_of(attrs), int(attrs["ring"]), heads_of(attrs))
    return (_steps if ring.heads.tile == 1 else _chunks)(ring, arrays)


def _steps(ring: Ring, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    c, ba, a_log, dt_bias, state, records, slots, starts, counts = arrays
    h = ring.heads
    o = np.zeros((len(c), h.values, h.value_dim))
    new_state, new_records = state.copy(), records.copy()
    for row in range(len(slots)):
        slot, start = int(slots[row]), int(starts[row])
        if slot < 0:
            continue
        due = ring.phases(start) == ring.length - 1
        if start == 0:
            due[:], new_state[slot] = True, 0
        if not counts[row]:
            continue
        s = _before(ring, state[slot], records[slot], start)
        token = gated_delta.factors(h, c[row], ba[row], a_log, dt_bias)
        o[row], delta = gated_delta.advance(h, s, token)
        new_state[slot][due] = s[due].astype(state.dtype)
        parts = [x.reshape(-1) for x in (delta, token.k, token.g)]
        new_records[slot, start % ring.length, : ring.decays + h.values] = np.concatenate(parts)
        if start == 0:
            new_records[slot, 0, -1] = 1
    return o.reshape(len(c), -1).astype(c.dtype), new_state, new_records


def _chunks(ring: Ring, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """gated_delta's reference over states that have been caught up."""
    c, ba, a_log, dt_bias, state, records, slots, starts, counts = arrays
    h, new_records = ring.heads, records.copy()
    o = np.zeros((len(c), h.values, h.value_dim))
    wide: dict[int, Wide] = {}  # float64 states of this launch, rounded once
    for row in range(len(slots)):
        slot, start = int(slots[row]), int(starts[row])
        if slot < 0:
            continue
        if start == 0 or slot not in wide:
            wide[slot] = _before(ring, state[slot], records[slot], start)
        for t in range(row * h.tile, row * h.tile + counts[row]):
            token = gated_delta.factors(h, c[t], ba[t], a_log, dt_bias)
            o[t], _ = gated_delta.advance(h, wide[slot], token)
        new_records[slot, 0, -1] = start + counts[row]
    new_state = state.copy()
    for slot, s in wide.items():
        new_state[slot] = s.astype(state.dtype)
    return o.reshape(len(c), -1).astype(c.dtype), new_state, new_records


def _before(ring: Ring, state: Array, records: Array, start: int) -> Wide:
    """The state before position `start`, a copy; zero at position 0, whatever the slot holds."""
    if start == 0:
        return np.zeros(state.shape)
    return caught_up(ring, state.astype(np.float64), records, start)


def step_body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """One token per row over the state caught up."""
    f = Text()
    step_fragment(f, heads_of(attrs), int(attrs["ring"]), without(specs), OUTPUTS[1:])
    return f.function("gated_delta_ring_step", INPUTS, OUTPUTS)


def step_fragment(
    f: Text, h: Heads, length: int, specs: tuple[TensorSpec, ...], outs: tuple[str, ...]
) -> None:
    """The body over the names INPUTS, written to `o` and `outs` (state, ring); `specs` are
    gated_delta's."""
    ring = ring_of("gated_delta_ring_step", length, h)
    rows = read_rows(f, "slots", "starts", "counts")
    lag = nodes.catch_up(f, ring, rows, "gdn_state", "gdn_ring")
    step = gated_delta.step_terms(f, h, rows, specs, lag.state)
    new = f("Where", nodes.folds(f, ring, rows), step.state, lag.stored)
    gated_delta.store(f, rows.slots, f.cast(new, specs[4].dtype), outs[0])
    nodes.append(f, ring, rows, lag, (step.delta, step.k, step.g), outs[1])


def chunk_body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """gated_delta_chunk from states caught up; `base` moves behind the last token."""
    f, h, n = Text(), heads_of(attrs), specs[6].dims[0]
    ring = ring_of("gated_delta_ring_chunk", int(attrs["ring"]), h)
    rows = read_rows(f, "slots", "starts", "counts")
    lag = nodes.catch_up(f, ring, rows, "gdn_state", "gdn_ring")
    gated_delta.chunk_fragment(f, h, rows, without(specs), lag.state)
    end = f.cast(f("Add", rows.starts, rows.counts), DType.F32)
    # Never the old one; but the ring, which may be the output's memory, is read before this.
    end = f("Where", f("Less", rows.starts, 0), nodes.base_of(f, ring, lag.records), end)
    nodes.store_base(f, ring, final_slots(f, rows, n), "gdn_ring", end, OUTPUTS[2])
    return f.function("gated_delta_ring_chunk", INPUTS, OUTPUTS)


def _op(name: str, body: Body, cases: tuple[Case, ...], cuda: Cuda) -> Op:
    """One of the two ops; they differ in how many tokens a row may have."""
    return Op(
        name=name,
        operands=OPERANDS,
        results=RESULTS,
        attrs=dict.fromkeys(ATTRS),
        infer=infer,
        reference=reference,
        body=body,
        cases=cases,
        cuda=cuda,
    )


STEP = _op("gated_delta_ring_step", step_body, gated_ring_cases.STEP, gdn_decode_cuda.CUDA)
CHUNK = _op("gated_delta_ring_chunk", chunk_body, gated_ring_cases.CHUNK, gated_delta_cuda.CUDA)
