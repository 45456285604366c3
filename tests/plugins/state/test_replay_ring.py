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
from tests.plugins.run_op import named

SLOT, TOKENS = 2, 48
HEADS = Heads(1, 2, 4, 16, 32)
PLAIN = gated_delta_cases.Launch(
    1, (SLOT,) * TOKENS, tuple(range(TOKENS)), (1,) * TOKENS, 2, 4, 16, 32
)


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
