"""A sequence that is swapped out and in again is, on every rank; what is forgotten, is by all."""

from __future__ import annotations

import gc

import numpy as np

from spark_engine.interface import Limits
from tests.runtime.fake import build_fake
from tests.runtime.ranks.fake_ranks import FakeGroup

LIMITS = Limits(3, 128, 6, 61, page_size=16, bias_slots=8, top_logprobs=3)
NAME = "layers.0.gdn_state"


def test_every_rank_saves_restores_and_forgets() -> None:
    group = FakeGroup([build_fake(LIMITS, (1,), (1,), lazy=False) for _ in range(3)])
    store, others = group.loaded.store, [f.memory for f in group.told.followers]
    assert store is not None
    for rank, states in enumerate((store.arrays, *(m.states for m in others))):
        states[NAME][0] = 10 + rank
        states["layers.1.k_pages"][4] = 20 + rank
    snapshot = store.save(0, [4])
    assert group.snapshots == 2
    for states in (store.arrays, *(m.states for m in others)):
        for array in states.values():
            array[...] = -1
    store.restore(snapshot, 2, [1])
    group.orders.send()
    for rank, states in enumerate((store.arrays, *(m.states for m in others))):
        assert states[NAME][2] == 10 + rank
        np.testing.assert_array_equal(states["layers.1.k_pages"][1], 20 + rank)
    del snapshot
    gc.collect()
    assert group.snapshots == 0
