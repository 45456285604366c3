"""A replay ring under rounds of drafts: up to `drafts` + 1 tokens a step, of which the first is
certain and the others may turn out to be rejected.

The records of positions q stand at q mod R, R = L + 2 · drafts; the row behind them is a header of
two numbers a value head: `done` [Hv], then `base` [Hv]. A value row folds after the same tokens as
without drafts, but what is stored has only the folds of positions below `done`: a row of group m
stands before position max(base, done − (done + m) mod L). A round at position p
1. makes the folds of positions done … p − 1, whose tokens were accepted, from their records;
2. computes token after token; a row folds for the later ones of its round whenever it is due, but
   only what position p makes due is stored;
3. writes the tokens' records, sets `done` to p + 1, and at p = 0 `base` to 1.
So tokens come out with the same bits however they are cut into rounds and whatever was rejected in
between. The records of rejected tokens are written over. A row without a token changes nothing.
Knows no op.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from spark_engine.plugins.state.replay_ring import Ring, Wide, append, replayed, since
from spark_engine.tensors import Array


class Held:
    """One slot while a launch goes over it."""

    def __init__(self, ring: Ring, state: Array, records: Array, start: int) -> None:
        """The slot's stored state [Hv,Dv,Dk] and its records before a round at `start`."""
        self.ring, self.state, self.records = ring, state.copy(), records.copy()
        if start == 0:  # whatever the slot holds
            self.state[...] = 0
            self.since: NDArray[np.int64] = np.zeros(state.shape[:2], np.int64)
            return
        self.since = since(ring, records, start)
        for position in range(int(records[-1, 0]), start):
            self.fold(position)

    def before(self, position: int) -> Wide:
        """The state [Hv,Dv,Dk] before a position up to which all is recorded."""
        wide = self.state.astype(np.float64)
        return replayed(self.ring, wide, self.records, position - self.since, position)

    def append(self, position: int, delta: Wide, k: Wide, g: Wide) -> None:
        """Records a token."""
        append(self.ring, self.records, position, (delta, k, g))

    def fold(self, position: int) -> None:
        """Brings what is due after a recorded token up to it."""
        due = self.ring.folds(position) if position else np.ones(self.since.shape, np.bool_)
        self.state[due] = self.before(position + 1)[due].astype(self.state.dtype)
        self.since[due] = position + 1

    def leave(self, done: int, base: int | None = None) -> None:
        """Writes the header; without `base` as it was."""
        values = self.ring.heads.values
        self.records[-1, :values] = done
        if base is not None:
            self.records[-1, values : 2 * values] = base
