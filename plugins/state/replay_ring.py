"""A recurrent state behind a replay ring: the layout, and one slot of it in numpy.

docs/graph.md says how a step reads, writes and folds. A record is the update that a token makes,
S ← e^g S + δ kᵀ: δ [Hv,Dv], k [Hk,Dk], g [Hv] and padding. With the n records that a value row lags
behind numbered by age, 1 the newest, the stored state S of the row means
    e^(g_1 + … + g_n) S + Σ_j e^(g_1 + … + g_{j−1}) δ_j k_jᵀ,
which token after token would have left but for the order of the sums. With `drafts` the ring is
longer and ends in a header. A state without a ring is as one record, which each token folds. Knows
no op.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spark_engine.errors import GraphError
from spark_engine.interface import MOST_DRAFTS
from spark_engine.op import Attrs
from spark_engine.tensors import Array

FOLD_ROWS = 16  # value rows that fold together
ALIGNMENT = 16  # floats: a record starts on 64 bytes
LEAST, MOST = 2, 16  # records
F16_MAX = 65504.0  # states do not reach it, but nothing bounds them
Wide = NDArray[np.float64]
Update = tuple[Wide, Wide, Wide]  # a token's δ [Hv,Dv], k [Hk,Dk], g [Hv]


@dataclass(frozen=True)
class Heads:
    """The attributes of one gated delta node."""

    tile: int
    keys: int
    values: int
    key_dim: int
    value_dim: int

    @property
    def repeat(self) -> int:
        """Value heads that share a key head."""
        return self.values // self.keys

    @property
    def width(self) -> int:
        """Columns of q|k|v."""
        return 2 * self.keys * self.key_dim + self.values * self.value_dim


def heads_of(attrs: Attrs) -> Heads:
    """The attributes, typed."""
    names = ("tile", "key_heads", "value_heads", "key_dim", "value_dim")
    return Heads(*(int(attrs[n]) for n in names))


@dataclass(frozen=True)
class Ring:
    """The layout of one slot's ring f32 [rows, width]; offsets in floats.

    `length`: tokens after which a value row folds. `drafts`: most drafts of a round.
    """

    length: int
    heads: Heads
    drafts: int = 0

    @property
    def records(self) -> int:
        """Records of the ring: position q is at q mod this number."""
        return self.length + 2 * self.drafts

    @property
    def rows(self) -> int:
        """Of a slot's array: the records, and with drafts a header."""
        return ring_records(self.length, self.drafts)

    @property
    def keys(self) -> int:
        """Offset of k [Hk,Dk] in a record; δ is at 0."""
        return self.heads.values * self.heads.value_dim

    @property
    def decays(self) -> int:
        """Offset of g [Hv] in a record."""
        return self.keys + self.heads.keys * self.heads.key_dim

    @property
    def used(self) -> int:
        """Floats of a record before its padding."""
        return self.decays + self.heads.values

    @property
    def width(self) -> int:
        """Floats of a record; without drafts the last of record 0 is `base`."""
        return -(-(self.used + 1) // ALIGNMENT) * ALIGNMENT

    @property
    def groups(self) -> NDArray[np.int64]:
        """The group of each value row, [Hv,Dv]."""
        per_head = -(-self.heads.value_dim // FOLD_ROWS)
        rows = np.arange(self.heads.value_dim) // FOLD_ROWS
        return np.arange(self.heads.values)[:, None] * per_head + rows

    def phases(self, start: int) -> NDArray[np.int64]:
        """(start + group) mod length of each value row, [Hv,Dv]."""
        found: NDArray[np.int64] = (start + self.groups) % self.length
        return found

    def since(self, records: Array, start: int) -> NDArray[np.int64]:
        """The position before which each value row of the stored state is, [Hv,Dv], of a sequence
        before position `start` > 0: with drafts it was left before the header's."""
        if not self.drafts:
            return start - np.minimum(start - int(records[0, -1]), self.phases(start))
        done, base = (int(records[-1, i * self.heads.values]) for i in range(2))
        return np.maximum(base, done - self.phases(done))

    def settle(self, records: Array, end: int) -> None:
        """Writes to a slot's `records` that all before position `end` is folded."""
        if self.drafts:
            records[-1, : 2 * self.heads.values] = end
        else:
            records[0, -1] = end


def narrowed(state: Wide, dtype: np.dtype[Any]) -> Array:
    """A state as it is stored: f16 saturates."""
    if dtype == np.float16:
        state = np.clip(state, -F16_MAX, F16_MAX)
    return state.astype(dtype)


def ring_of(attrs: Attrs) -> Ring | None:
    """The ring of a node; None for a length of 0. Raises GraphError for one that no op takes."""
    length, drafts = int(attrs["ring"]), int(attrs.get("drafts", 0))
    if drafts and not (length and drafts <= MOST_DRAFTS):
        raise GraphError(
            f"{drafts} drafts over a ring of {length} records; they need a ring, and {MOST_DRAFTS} "
            "are the most"
        )
    if length and not LEAST <= length <= MOST:
        raise GraphError(f"a ring of {length} records; {LEAST} to {MOST} are possible, or 0: none")
    heads = heads_of(attrs)
    if length and heads.key_dim < ALIGNMENT:
        raise GraphError(f"a ring of keys of {heads.key_dim}; {ALIGNMENT} is the least")
    return Ring(length, heads, drafts) if length else None


def ring_records(length: int, drafts: int) -> int:
    """Rows of a slot's ring: a round of drafts may write 2 · drafts records ahead of what must be
    kept, and the last row is then a header."""
    return length + 2 * drafts + 1 if drafts else length


def ring_behind(state: tuple[int, ...], records: tuple[int, ...], drafts: int = 0) -> Ring:
    """The ring of one slot by the shapes of its state [Hv,Dv,Dk] and of its records."""
    values, value_dim, key_dim = state
    # Padding is shorter than a key, which has at least ALIGNMENT floats.
    keys = (records[1] - values * (value_dim + 1) - 1) // key_dim
    length = records[0] - ring_records(0, drafts)
    return Ring(length, Heads(1, keys, values, key_dim, value_dim), drafts)


def ring_width(key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> int:
    """Floats of a record of heads of these sizes."""
    return Ring(LEAST, Heads(1, key_heads, value_heads, key_dim, value_dim)).width


class StoredState:
    """One slot while a launch steps over it.

    With drafts a row folds after the same tokens as without, but the slot gets only the folds of
    positions below `done`: those from there on may be rejected. So tokens have the same bits
    however they are cut into rounds and whatever was rejected in between.
    """

    def __init__(self, ring: Ring, state: Array, records: Array, start: int) -> None:
        """The slot's `state` [Hv,Dv,Dk] and `records` [rows,width] before position `start`."""
        self.ring, self.state, self.records = ring, state.copy(), records.copy()
        if start == 0:  # whatever the slot holds
            self.state[...] = 0
            self.since: NDArray[np.int64] = np.zeros(state.shape[:2], np.int64)
            return
        self.since = ring.since(records, start)
        for position in range(int(records[-1, 0]) if ring.drafts else start, start):
            self._fold(position)  # accepted since

    def before(self, position: int) -> Wide:
        """The state [Hv,Dv,Dk] before a position up to which all is recorded."""
        ring, h, behind = self.ring, self.ring.heads, position - self.since
        added, factor = np.zeros(self.state.shape), np.ones((h.values, h.value_dim))
        decay = np.ones(h.values)
        for age in range(1, int(behind.max()) + 1):
            record = self.records[(position - age) % ring.records].astype(np.float64)
            delta = decay[:, None] * record[: ring.keys].reshape(h.values, h.value_dim)
            k = record[ring.keys : ring.decays].reshape(h.keys, h.key_dim)
            live = behind >= age
            added += np.where(live, delta, 0)[..., None] * np.repeat(k, h.repeat, axis=0)[:, None]
            decay = decay * np.exp(record[ring.decays : ring.used])
            factor = np.where(live, decay[:, None], factor)
        return factor[..., None] * self.state.astype(np.float64) + added

    def append(self, position: int, update: Update) -> None:
        """Records a token's update, and folds what is due after it."""
        record = np.concatenate([x.reshape(-1) for x in update])
        self.records[position % self.ring.records, : self.ring.used] = record
        if position == 0 and not self.ring.drafts:
            self.records[0, -1] = 1
        self._fold(position)

    def _fold(self, position: int) -> None:
        due = (self.ring.phases(position) == self.ring.length - 1) | (position == 0)
        self.state[due] = narrowed(self.before(position + 1)[due], self.state.dtype)
        self.since[due] = position + 1

    def end_round(self, start: int) -> None:
        """Writes the header that a round of drafts from `start` leaves: one token is certain."""
        values = self.ring.heads.values
        self.records[-1, :values] = start + 1
        if start == 0:
            self.records[-1, values : 2 * values] = 1


def slot_of(ring: Ring | None, h: Heads, arrays: list[Array], slot: int, start: int) -> StoredState:
    """A slot of `gdn_state` and, behind a ring, of `gdn_ring`, before position `start`."""
    state, *rings = (array[slot] for array in arrays)
    ring = ring or Ring(1, h)
    return StoredState(ring, state, rings[0] if rings else np.zeros((1, ring.width)), start)


def whole_state(state: Array, records: Array, end: int, drafts: int = 0) -> Array:
    """The state [Hv,Dv,Dk] of a slot after `end` > 0 tokens, by its records [rows, width]."""
    ring = ring_behind(state.shape, records.shape, drafts)
    return StoredState(ring, state.astype(np.float64), records, end).before(end)
