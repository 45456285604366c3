"""A replay ring behind the recurrent state of the gated delta rule: layout, and its sum in numpy.

docs/graph.md tells how a step reads, writes and folds. A record is δ [Hv,Dv], k [Hk,Dk], g [Hv] and
padding. With the n records that a value row lags behind numbered by age, 1 the newest, the state S
that is stored for it stands for
    e^(g_1 + … + g_n) S + Σ_j e^(g_1 + … + g_{j−1}) δ_j k_jᵀ,
what token after token would have left but for the order of the sums. With `drafts` the ring is
longer and ends in a header (see `round_ring`). Knows no op.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spark_engine.errors import GraphError
from spark_engine.interface import MOST_DRAFTS
from spark_engine.op import Attrs
from spark_engine.tensors import Array

FOLD_ROWS = 16  # value rows that fold together
ALIGNMENT = 16  # floats: a record starts on 64 bytes
LEAST, MOST = 2, 16  # records
Wide = NDArray[np.float64]


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
    """Where things stand in one slot's ring f32 [rows, width]; offsets in floats.

    `length`: tokens after which a value row folds. `drafts`: most drafts of a round.
    """

    length: int
    heads: Heads
    drafts: int = 0

    @property
    def records(self) -> int:
        """Records of the ring: position q stands at q mod so many."""
        return self.length + 2 * self.drafts

    @property
    def rows(self) -> int:
        """Of a slot's array: the records, and with drafts a header."""
        return ring_records(self.length, self.drafts)

    @property
    def keys(self) -> int:
        """Offset of k [Hk,Dk] in a record; δ stands at 0."""
        return self.heads.values * self.heads.value_dim

    @property
    def decays(self) -> int:
        """Offset of g [Hv] in a record."""
        return self.keys + self.heads.keys * self.heads.key_dim

    def __post_init__(self) -> None:
        if self.heads.key_dim < ALIGNMENT:
            raise GraphError(f"a ring of keys of {self.heads.key_dim}; {ALIGNMENT} is the least")

    @property
    def width(self) -> int:
        """Floats of a record; without drafts the last of record 0 is `base`."""
        used = self.decays + self.heads.values + 1
        return -(-used // ALIGNMENT) * ALIGNMENT

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

    def folds(self, start: int) -> NDArray[np.bool_]:
        """Whether a step at position `start` > 0 rewrites each value row, [Hv,Dv]."""
        return np.asarray(self.phases(start) == self.length - 1)


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
    return Ring(length, heads_of(attrs), drafts) if length else None


def ring_records(length: int, drafts: int) -> int:
    """Rows of a slot's ring: a round of drafts may write 2 · drafts records ahead of what must be
    kept, and the last row is then a header."""
    return length + 2 * drafts + 1 if drafts else length


def ring_behind(state: tuple[int, ...], records: tuple[int, ...], drafts: int = 0) -> Ring:
    """The ring of one slot by the shapes of its state [Hv,Dv,Dk] and of its records."""
    values, value_dim, key_dim = state
    # Padding is shorter than a key, whose size is at least its alignment.
    keys = (records[1] - values * (value_dim + 1) - 1) // key_dim
    length = records[0] - ring_records(0, drafts)
    return Ring(length, Heads(1, keys, values, key_dim, value_dim), drafts)


def whole_state(state: Array, records: Array, end: int, drafts: int = 0) -> Array:
    """The state of a slot after `end` tokens, by its records [rows, width]: `caught_up`."""
    ring = ring_behind(state.shape, records.shape, drafts)
    return caught_up(ring, state.astype(np.float64), records, end)


def ring_width(key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> int:
    """Floats of a record of heads of these sizes."""
    return Ring(LEAST, Heads(1, key_heads, value_heads, key_dim, value_dim)).width


def ring_bytes(length: int, keys: int, values: int, key_dim: int, value_dim: int) -> float:
    """Bytes that a step moves of one slot's ring once it is full: the other records' keys, of
    their deltas those that some group has not folded in (half of them), and a new record."""
    others = length - 1
    floats = (others + 1) * (keys * key_dim + values) + (others / 2 + 1) * values * value_dim
    return 4 * floats


def append(ring: Ring, records: Array, start: int, token: tuple[Wide, Wide, Wide]) -> None:
    """Writes the record of the token at position `start`, its (δ, k, g), into a slot's `records`
    [rows, width], and without drafts `base` at position 0."""
    parts = [x.reshape(-1) for x in token]
    records[start % ring.records, : ring.decays + ring.heads.values] = np.concatenate(parts)
    if start == 0 and not ring.drafts:
        records[0, -1] = 1


def since(ring: Ring, records: Array, start: int) -> NDArray[np.int64]:
    """The position before which each value row of the stored state stands, [Hv,Dv], of a sequence
    that is before position `start` > 0: with drafts it was left before the header's."""
    if not ring.drafts:
        return start - np.minimum(start - int(records[0, -1]), ring.phases(start))
    done, base = (int(records[-1, i * ring.heads.values]) for i in range(2))
    return np.maximum(base, done - ring.phases(done))


def caught_up(ring: Ring, state: Wide, records: Array, start: int) -> Wide:
    """The state [Hv,Dv,Dk] that the sequence has before position `start` > 0.

    `state` is the stored one, `records` [rows, width] the slot's ring.
    """
    return replayed(ring, state, records, start - since(ring, records, start), start)


def replayed(
    ring: Ring, state: Wide, records: Array, behind: NDArray[np.int64], start: int
) -> Wide:
    """`state` whose value rows lag `behind` [Hv,Dv] tokens, as it is before position `start`."""
    h = ring.heads
    wide = records.astype(np.float64)
    added, factor = np.zeros(state.shape), np.ones((h.values, h.value_dim))
    decay = np.ones(h.values)
    for age in range(1, int(behind.max()) + 1):
        record = wide[(start - age) % ring.records]
        delta = decay[:, None] * record[: ring.keys].reshape(h.values, h.value_dim)
        k = np.repeat(record[ring.keys : ring.decays].reshape(h.keys, h.key_dim), h.repeat, axis=0)
        live = behind >= age
        added += np.where(live, delta, 0)[..., None] * k[:, None]
        decay = decay * np.exp(record[ring.decays : ring.decays + h.values])
        factor = np.where(live, decay[:, None], factor)
    return factor[..., None] * state + added
