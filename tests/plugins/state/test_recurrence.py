"""Another rule than the gated delta rule, S ← e^g S + v kᵀ, behind every kind of storage: an op is
made of a rule for one state, whichever it is."""

import numpy as np
import pytest

from spark_engine.op import Attrs
from spark_engine.plugins.state import recurrence
from spark_engine.plugins.state.replay_ring import Heads, Ring, Update, Wide, whole_state
from spark_engine.tensors import Array

HEADS, TOKENS, SLOT = Heads(1, 1, 2, 16, 32), 41, 1
SIZES: Attrs = {"key_heads": 1, "value_heads": 2, "key_dim": 16, "value_dim": 32}


def tokens() -> tuple[Wide, Wide, Wide]:
    """v [tokens,Hv,Dv], k [tokens,Hk,Dk], g [tokens,Hv]."""
    rng = np.random.default_rng(3)
    shapes = (HEADS.values, HEADS.value_dim), (HEADS.keys, HEADS.key_dim), (HEADS.values,)
    v, k, g = (rng.standard_normal((TOKENS, *shape)) for shape in shapes)
    return v, k, -np.abs(g) * 0.3


def launch(start: int, count: int, tile: int, ring: Ring | None, states: list[Array]) -> Wide:
    """o of the tokens from `start`; updates `states`."""
    v, k, g = tokens()

    def rule(token: int, s: Wide) -> tuple[Wide, Update]:
        t = start + token
        o: Wide = s @ k[t, 0]
        s[...] = np.exp(g[t])[:, None, None] * s + v[t][..., None] * k[t, 0]
        return o, (v[t], k[t], g[t])

    rows = [np.asarray([x], np.int32) for x in (SLOT, start, count, SLOT, -1)]
    given = [*states, *(rows if tile == 64 else rows[:3])]
    length, drafts = (ring.length, ring.drafts) if ring else (0, 0)
    attrs: Attrs = {**SIZES, "tile": tile, "ring": length, "drafts": drafts}
    o, states[:] = recurrence.evaluate(rule, attrs, tile, given)
    return o[:count]


def fresh(ring: Ring | None) -> list[Array]:
    """States of two slots that hold NaN."""
    shape = (2, HEADS.values, HEADS.value_dim, HEADS.key_dim)
    shapes = [shape, (2, ring.rows, ring.width)] if ring else [shape]
    return [np.full(s, np.nan, np.float32) for s in shapes]


@pytest.mark.parametrize("ring", [Ring(2, HEADS), Ring(8, HEADS), Ring(8, HEADS, 3)])
def test_any_rule_goes_behind_a_ring(ring: Ring) -> None:
    """Prompt, steps, prompt, steps; with drafts two tokens a round."""
    plain, stored, at = fresh(None), fresh(ring), 0
    tile = 2 if ring.drafts else 1
    for count in (5, *[1] * 13, 7, *[1] * 16):
        prompt = count > 1
        want = launch(at, count, 64 if prompt else 1, None, plain)
        more = min(tile, TOKENS - at)  # of which the first is accepted
        got = launch(at, count if prompt else more, 64 if prompt else tile, ring, stored)
        np.testing.assert_allclose(got[:count], want, rtol=1e-5, atol=1e-6)
        at += count
        whole = whole_state(stored[0][SLOT], stored[1][SLOT], at, ring.drafts)
        np.testing.assert_allclose(whole, plain[0][SLOT], rtol=1e-5, atol=1e-6)
    assert at == TOKENS and all(np.isnan(x[1 - SLOT]).all() for x in (*plain, *stored))
