"""The gated delta rule against literals, and with its replay ring against a float64 recurrence
written apart (oracles/delta_truth.py): results, states, records and base after every launch."""

import math

import numpy as np
import pytest

from spark_engine.op import Attrs
from spark_engine.plugins.ops.delta_rule import gated_delta
from spark_engine.tensors import Array
from tests.oracles import delta_truth
from tests.plugins import run_op

SIZES = delta_truth.Sizes(hk=2, hv=4, dk=16, dv=32)
SLOT, TOKENS = 1, 40
HOW = pytest.mark.parametrize("how", ["reference", "body"])


def given(s: delta_truth.Sizes, count: int = TOKENS) -> dict[str, Array]:
    """Tokens with strong and weak gates, long and short memories, some keys nearly zero."""
    rng = np.random.default_rng(8)
    c = rng.standard_normal((count, 2 * s.hk * s.dk + s.hv * s.dv))
    c[::5, s.hk * s.dk : 2 * s.hk * s.dk] *= 2e-4
    c[3::7, : s.hk * s.dk] *= 2e-4
    arrays = {
        "c": c,
        "ba": rng.standard_normal((count, 2 * s.hv)) * 2,
        "a_log": rng.uniform(-3, 1, s.hv),
        "dt_bias": rng.uniform(-5, 0, s.hv),
    }
    return {name: a.astype(np.float32) for name, a in arrays.items()}


class Sequence:
    """One sequence in SLOT through the ops, its state and ring kept; both begin as NaN."""

    def __init__(self, s: delta_truth.Sizes, arrays: dict[str, Array], how: str, ring: int) -> None:
        self.s, self.arrays, self.how, self.ring = s, arrays, how, ring
        self.slot, self.source, self.save = SLOT, SLOT, -1
        self.state = np.full((4, s.hv, s.dv, s.dk), np.nan, np.float32)
        width = -(-(s.hv * s.dv + s.hk * s.dk + s.hv + 1) // 16) * 16
        self.records = np.full((4, ring or 1, width), np.nan, np.float32)

    def go(self, start: int, count: int, chunk: bool) -> Array:
        """o [count,Hv,Dv] of the tokens from `start`."""
        op, tile = (gated_delta.CHUNK, 64) if chunk else (gated_delta.STEP, 1)
        pad = ((0, tile - count), (0, 0))
        cut = {n: np.pad(self.arrays[n][start : start + count], pad) for n in ("c", "ba")}
        operands = {**self.arrays, **cut, "gdn_state": self.state, "gdn_ring": self.records}
        rows = {"slots": self.slot, "starts": start, "counts": count}
        rows |= {"sources": self.source, "saves": self.save}
        operands |= {n: np.asarray([v], np.int32) for n, v in rows.items()}
        s = self.s
        heads = {"key_heads": s.hk, "value_heads": s.hv, "key_dim": s.dk, "value_dim": s.dv}
        attrs: Attrs = {**heads, "tile": tile, "ring": self.ring}
        chosen = {o.name: operands[o.name] for o in op.given(attrs)}
        if self.how == "reference":
            outputs = list(op.reference(attrs, tuple(chosen.values())))
        else:
            outputs = run_op.run(op, attrs, chosen)
        self.state = outputs[1]
        if self.ring:
            self.records = outputs[2]
        return np.asarray(outputs[0][:count].reshape(count, s.hv, s.dv))


# ---- literals ------------------------------------------------------------------------------------

ONE = delta_truth.Sizes(hk=1, hv=1, dk=4, dv=2)


def one_head(
    tokens: list[tuple[float, float, tuple[float, float]]], b: float, a: float
) -> dict[str, Array]:
    """Tokens (q, k, v); queries and keys point along the first axis."""
    c = [[q, 0, 0, 0, k, 0, 0, 0, *v] for q, k, v in tokens]
    arrays = {
        "c": c,
        "ba": [[b, a]] * len(c),
        "a_log": [math.log(2)],
        "dt_bias": [math.log(math.e - 1) - 0.3],
    }
    return {name: np.asarray(x, np.float32) for name, x in arrays.items()}


@HOW
@pytest.mark.parametrize("chunk", [False, True], ids=["step", "chunk"])
@pytest.mark.parametrize(("q", "k"), [(1e3, 1e-3), (1e-3, 1e3)])
def test_literal_norms_of_short_vectors(q: float, k: float, chunk: bool, how: str) -> None:
    """Σx² = 1e-6 and eps = 1e-6: the unit vector is 1/√2 long. β = 1/2 at b = 0.

    v (2, −4): δ = (1, −2), k·q = 0.70710678 · 1 / √4, so o = (0.35355339, −0.70710678).
    """
    sequence = Sequence(ONE, one_head([(q, k, (2, -4))], b=0, a=0.3), how, ring=0)
    got = sequence.go(0, 1, chunk)
    np.testing.assert_allclose(got[0, 0], [0.35355339, -0.70710678], rtol=2e-6)


@HOW
@pytest.mark.parametrize("chunk", [False, True], ids=["step", "chunk"])
def test_literal_decay_and_gate(chunk: bool, how: str) -> None:
    """a + dt_bias = ln(e − 1): softplus 1; a_log ln 2: g = −2, decay 0.13533528. b = ln 3: β 3/4.

    Token 0 leaves S k = 0.75 v. Token 1, k = 0, sees e⁻² of it through q of length 1/√4. Token 2
    writes δ = 0.75 (v − e⁻⁴ · 0.75 v₀) along k and reads e⁻⁴ · 0.75 v₀ + δ.
    """
    tokens = [(1e3, 1e3, (4.0, -8.0)), (1e3, 0.0, (5.0, 5.0)), (1e3, 1e3, (1.0, 2.0))]
    sequence = Sequence(ONE, one_head(tokens, b=math.log(3), a=0.3), how, ring=0)
    if chunk:
        o = sequence.go(0, 3, True)[:, 0]
    else:
        o = np.concatenate([sequence.go(t, 1, False)[:, 0] for t in range(3)])
    np.testing.assert_allclose(o[0], [1.5, -3.0], rtol=3e-6)
    np.testing.assert_allclose(o[1], [1.5 * 0.13533528, -3 * 0.13533528], rtol=3e-6)
    faded = 0.01831564 * 0.75 * np.asarray([4.0, -8.0])
    want = (faded + 0.75 * (np.asarray([1.0, 2.0]) - faded)) / 2
    np.testing.assert_allclose(o[2], want, rtol=3e-6)
    np.testing.assert_allclose(sequence.state[SLOT, 0, :, 0], 2 * want, rtol=3e-6)
    assert (sequence.state[SLOT, 0, :, 1:] == 0).all()


# ---- against the recurrence ----------------------------------------------------------------------

PLANS = {
    "steps": [1] * 18,
    "a prompt, then steps": [-5, *[1] * 12],
    "prompts between": [1] * 5 + [-9] + [1] * 4 + [-3] + [1] * 5,
}


@HOW
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("length", [0, 3, 8])
def test_the_ops_follow_the_recurrence(length: int, plan: str, how: str) -> None:
    """`length` 0: without ring. A negative entry of a plan is a chunk of so many tokens."""
    arrays = given(SIZES)
    history = delta_truth.recur(SIZES, *(a.astype(np.float64) for a in arrays.values()))
    ring = delta_truth.Ring(SIZES, length or 1, history)
    sequence, at = Sequence(SIZES, arrays, how, length), 0
    near = {"rtol": 2e-5, "atol": 2e-6}
    for count in PLANS[plan]:
        if length and at:
            assert ring.lags_as_stored(at)
        o = sequence.go(at, abs(count), chunk=count < 0)
        np.testing.assert_allclose(o, history.o[at : at + abs(count)], **near)
        for p in range(at, at + abs(count) if count > 0 else at):
            ring.step(p)
        at += abs(count)
        if count < 0 or not length:
            ring.prefill(at)
        np.testing.assert_allclose(sequence.state[SLOT], ring.stored, **near)
        if length:
            records = sequence.records[SLOT]
            assert records[0, -1] == ring.base
            for index, want in ring.known.items():
                np.testing.assert_allclose(records[index, : len(want)], want, **near)
    for other in (0, 2):
        assert np.isnan(sequence.state[other]).all(), "another slot was written"


@HOW
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("length", [0, 3, 8])
def test_a_prompt_resumes_from_a_saved_row_and_from_a_copy(
    length: int, steps: int, how: str
) -> None:
    """In slot 0 from row 2, which was saved behind 9 tokens or is a copy of the slot after more."""
    arrays = given(SIZES)
    history = delta_truth.recur(SIZES, *(a.astype(np.float64) for a in arrays.values()))
    sequence, near = Sequence(SIZES, arrays, how, length), {"rtol": 2e-5, "atol": 2e-6}
    sequence.save = 2
    sequence.records[2] = 1.5  # what it had before
    sequence.go(0, 9, chunk=True)
    for t in range(9, 9 + steps):
        sequence.go(t, 1, chunk=False)
    if steps:  # records are pending
        sequence.state[2], sequence.records[2] = sequence.state[SLOT], sequence.records[SLOT]
    sequence.state[SLOT] = np.nan
    sequence.slot, sequence.source, sequence.save = 0, 2, -1
    at = 9 + steps
    o = sequence.go(at, 7, chunk=True)
    np.testing.assert_allclose(o, history.o[at : at + 7], **near)
    for t in range(at + 7, at + 12):
        np.testing.assert_allclose(sequence.go(t, 1, chunk=False)[0], history.o[t], **near)
