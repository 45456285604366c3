"""The replay ring: what a lagging state and its records say is what the plain rule would hold."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.byte_floors import ring_bytes
from spark_engine.errors import GraphError
from spark_engine.op import Attrs
from spark_engine.plugins.ops.delta_rule import gated_delta
from spark_engine.plugins.state.replay_ring import (
    MOST,
    Heads,
    Ring,
    ring_behind,
    ring_of,
    ring_width,
    whole_state,
)
from spark_engine.tensors import Array, DType
from tests.plugins.cases.delta_rule import gated_delta as gated_delta_cases
from tests.plugins.run_op import named, run

SLOT, TOKENS = 2, 48
HEADS = Heads(1, 2, 4, 16, 32)
PLAIN = gated_delta_cases.Launch(
    1, (SLOT,) * TOKENS, tuple(range(TOKENS)), (1,) * TOKENS, 2, 4, 16, 32
)
Plan = list[tuple[str, int]]


def tokens() -> dict[str, Array]:
    """The operands of a sequence of TOKENS tokens from position 0, in a slot that holds NaN."""
    return named(gated_delta.STEP, PLAIN.inputs(np.random.default_rng(11)))


def truth(end: int) -> tuple[Array, Array]:
    """The plain reference's o of the first `end` tokens, and the state after them."""
    cut = replace(PLAIN, slots=(SLOT,) * end, starts=tuple(range(end)), counts=(1,) * end)
    arrays = tokens()
    given = {n: a[:end] if n in ("c", "ba") else a for n, a in arrays.items()}
    rows = (np.asarray(x, np.int32) for x in (cut.slots, cut.starts, cut.counts))
    given |= dict(zip(("slots", "starts", "counts"), rows, strict=True))
    o, state = gated_delta.reference(PLAIN.attrs, tuple(given.values()))
    return o, state[SLOT]


class Sequence:
    """Decodes and prefills by the bodies, keeping state and ring as an engine does."""

    def __init__(self, length: int, slot: int = SLOT) -> None:
        self.ring, self.slot = Ring(length, HEADS), slot
        arrays = tokens()
        self.given = {n: arrays[n] for n in ("c", "ba", "a_log", "dt_bias")}
        self.state = np.full_like(arrays["gdn_state"], np.nan)
        shape = (len(self.state), length, self.ring.width)
        self.records = np.full(shape, np.nan, np.float32)

    def go(self, kind: str, start: int, end: int) -> Array:
        """o of tokens start…end; `kind` is "step" (one token) or "chunk"."""
        op, tile = (gated_delta.STEP, 1) if kind == "step" else (gated_delta.CHUNK, 64)
        pad = ((0, tile - (end - start)), (0, 0))
        cut = {n: np.pad(self.given[n][start:end], pad) for n in ("c", "ba")}
        rows = {"slots": self.slot, "starts": start, "counts": end - start}
        rows |= {"sources": self.slot, "saves": -1}
        operands = {**self.given, **cut, "gdn_state": self.state, "gdn_ring": self.records}
        operands |= {n: np.asarray([v], np.int32) for n, v in rows.items()}
        attrs: Attrs = {**PLAIN.attrs, "tile": tile, "ring": self.ring.length}
        o, self.state, self.records = run(
            op, attrs, {o.name: operands[o.name] for o in op.given(attrs)}
        )
        return o[: end - start]

    def now(self, end: int) -> Array:
        """The state that the sequence has before position `end`."""
        return whole_state(self.state[self.slot], self.records[self.slot], end)


@pytest.mark.parametrize("length", [2, 3, 8, 16])
@pytest.mark.parametrize("plan", [[("step", 1)] * 40, [("chunk", 5)] + [("step", 1)] * 30], ids=len)
def test_steps_behind_a_ring_are_the_plain_steps(length: int, plan: Plan) -> None:
    sequence, at = Sequence(length), 0
    for kind, n in plan:
        before = sequence.state[SLOT].copy()
        o = sequence.go(kind, at, at + n)
        due = sequence.ring.phases(at) == length - 1
        same = sequence.state[SLOT] == before
        assert kind == "chunk" or at == 0 or same[~due].all(), "rows changed before their turn"
        assert due.any() or length > sequence.ring.groups.max() + 1
        at += n
        want_o, want = truth(at)
        np.testing.assert_allclose(o, want_o[at - n :], rtol=1e-5, atol=3e-6)
        np.testing.assert_allclose(sequence.now(at), want, rtol=1e-5, atol=3e-6)


def test_a_prefill_takes_up_what_the_ring_holds() -> None:
    plan: Plan = (
        [("step", 1)] * 6 + [("chunk", 9)] + [("step", 1)] * 5 + [("chunk", 3), ("step", 1)]
    )
    sequence, at = Sequence(8), 0
    for kind, n in plan:
        o = sequence.go(kind, at, at + n)
        at += n
        np.testing.assert_allclose(o, truth(at)[0][at - n :], rtol=1e-5, atol=3e-6)
        if kind == "chunk":
            assert sequence.records[SLOT, 0, -1] == at
            np.testing.assert_allclose(sequence.state[SLOT], truth(at)[1], rtol=1e-5, atol=3e-6)


def test_a_sequence_may_move_to_another_slot() -> None:
    """Copied out and in as swapping does, it continues with the same bits."""
    stayed, moved = Sequence(8), Sequence(8)
    for t in range(21):
        if t == 13:
            moved.slot = 5
            for states in (moved.state, moved.records):
                states[5], states[SLOT] = states[SLOT].copy(), np.nan
        assert stayed.go("step", t, t + 1).tobytes() == moved.go("step", t, t + 1).tobytes()
    assert stayed.state[SLOT].tobytes() == moved.state[5].tobytes()


def test_an_eighth_of_the_rows_folds_each_step() -> None:
    ring = Ring(8, Heads(1, 16, 48, 128, 128))
    for start in (1, 77, 1 << 20):
        shares = [np.mean(ring.phases(start) == phase) for phase in range(8)]
        assert shares == [1 / 8] * 8


def test_the_layout_follows_from_the_shapes() -> None:
    for heads in (HEADS, Heads(1, 16, 48, 128, 128), Heads(1, 16, 32, 128, 128)):
        ring = Ring(8, heads)
        state = (heads.values, heads.value_dim, heads.key_dim)
        assert ring_behind(state, (8, ring.width)) == ring
        sizes = (heads.keys, heads.values, heads.key_dim, heads.value_dim)
        assert ring_width(*sizes) == ring.width
        assert ring_bytes(8, heads.keys, heads.values, heads.key_dim, heads.value_dim) < (
            4 * 8 * ring.width
        )


def test_what_no_op_takes_is_refused() -> None:
    assert ring_of(PLAIN.attrs) is None
    with pytest.raises(GraphError, match="ring of 1 records"):
        ring_of({**PLAIN.attrs, "ring": 1})
    with pytest.raises(GraphError, match=f"2 to {MOST}"):
        ring_of({**PLAIN.attrs, "ring": MOST + 1})
    with pytest.raises(GraphError, match="keys of 8"):
        ring_of({**PLAIN.attrs, "ring": 8, "key_dim": 8})


def test_a_bf16_state_is_rounded_once_a_fold() -> None:
    """Nearer to the truth than a state that is rounded at every token."""
    small = replace(PLAIN, state=DType.BF16)
    arrays = named(gated_delta.STEP, small.inputs(np.random.default_rng(11)))
    plain, ring = np.zeros_like(arrays["gdn_state"]), Ring(8, HEADS)
    held = plain.copy()
    records = np.zeros((len(held), 8, ring.width), np.float32)
    for t in range(TOKENS):
        rows = [np.asarray([x], np.int32) for x in (SLOT, t, 1)]
        token = (
            arrays["c"][t : t + 1],
            arrays["ba"][t : t + 1],
            arrays["a_log"],
            arrays["dt_bias"],
        )
        _, plain = gated_delta.reference(small.attrs, (*token, plain, *rows))
        attrs: Attrs = {**small.attrs, "ring": 8}
        _, held, records = gated_delta.reference(attrs, (*token, held, records, *rows))
    want = truth(TOKENS)[1]
    now = whole_state(held[SLOT], records[SLOT], TOKENS)
    far = [np.linalg.norm(x.astype(np.float64) - want) for x in (plain[SLOT], now)]
    assert far[1] < 0.8 * far[0]
