"""Nodes of a replay ring in a body: a slot while a launch steps over it, token after token
(`replay_ring.StoredState`).

Every token's nodes have the shapes that they have in a round of one token, so that its bits are the
same. The sums are written out in full (a state is materialised), as fits the CPU. What is not live
is zero before it is used. Knows the layout of `replay_ring`; knows no op.
"""

from dataclasses import dataclass, replace

import numpy as np

from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.sequence_tiles import Rows, final_slots, over
from spark_engine.plugins.state.replay_ring import F16_MAX, Ring
from spark_engine.tensors import DType


@dataclass(frozen=True)
class Held:
    """Names of what every row's slot holds; states are f32 with values of `dtype`."""

    ring: Ring
    dtype: DType
    stored: str  # [rows,Hv,Dv,Dk], as it was found
    rest: str  # [rows,1,width]: the header as it was found; without drafts [rows,1,1]: `base`
    state: str  # [rows,Hv,Dv,Dk]
    since: str  # int64 [rows,Hv,Dv]: the position before which `state` is
    records: str  # [rows,R,width]


def narrowed(f: Text, state: str, dtype: DType) -> str:
    """A state f32 as it is stored: f16 saturates, and a NaN stays one."""
    if dtype is DType.F16:
        state = f("Min", f("Max", state, -F16_MAX), F16_MAX)
    return f.cast(state, dtype)


def opened(f: Text, ring: Ring, rows: Rows, dtype: DType) -> Held:
    """What rows of `gdn_state` and `gdn_ring` begin from, all accepted tokens' folds made."""
    stored = f.cast(f("Gather", "gdn_state", rows.sources), DType.F32)
    records = f("Gather", "gdn_ring", rows.sources)
    if ring.drafts:
        rest = f("Slice", records, [ring.records], [ring.rows], [1])
        records = f("Slice", records, [0], [ring.records], [1])
        done, base = (_number(f, rows, rest, i * ring.heads.values) for i in range(2))
    else:
        rest = f("Slice", records, [0, ring.width - 1], [1, ring.width], [1, 2])
        done, base = rows.starts, _number(f, rows, rest, 0)
    since = f("Sub", over(f, done, [1, 2]), phases(f, ring, done))
    since = f("Max", over(f, base, [1, 2]), since)
    since = f("Where", over(f, rows.fresh, [1, 2]), 0, since)
    state = f("Where", over(f, rows.fresh, [1, 2, 3]), 0.0, stored)
    held = Held(ring, dtype, stored, rest, state, since, records)
    for i in range(ring.drafts):
        position = f("Add", done, i)
        held = _fold_recorded(f, held, position, f("Less", position, rows.starts))
    return held


def _number(f: Text, rows: Rows, rest: str, column: int) -> str:
    """int64 [rows]: a number of `Held.rest`, 0 where fresh."""
    found = f("Reshape", f("Slice", rest, [column], [column + 1], [2]), [-1])
    return f.long(f("Where", rows.fresh, 0.0, found))


def phases(f: Text, ring: Ring, position: str) -> str:
    """int64 [rows, Hv, Dv]: (position + group) mod L."""
    return f("Mod", f("Add", over(f, position, [1, 2]), ring.groups[None]), ring.length)


def _part(f: Text, records: str, offset: int, width: int) -> str:
    """[rows, L, width]: so many columns of every record."""
    return f("Slice", records, [offset], [offset + width], [2])


def _keys(f: Text, ring: Ring, records: str) -> str:
    """[rows, Hv, L, Dk]: each key head's `repeat` times in a row."""
    h = ring.heads
    k = _part(f, records, ring.keys, h.keys * h.key_dim)
    k = f("Reshape", k, [0, ring.length, h.keys, h.key_dim])
    k = f("Unsqueeze", f("Transpose", k, perm=[0, 2, 1, 3]), [2])  # [rows, Hk, 1, L, Dk]
    k = f("Expand", k, [1, 1, h.repeat, 1, 1])
    return f("Reshape", k, [0, h.values, ring.length, h.key_dim])


def before(f: Text, held: Held, position: str) -> str:
    """f32 [rows,Hv,Dv,Dk]: the state before `position` int64 [rows]."""
    ring, h = held.ring, held.ring.heads
    ages = np.arange(1, ring.length + 1)
    places = f("Mod", f("Sub", over(f, position, [1]), ages[None]), ring.records)
    records = f("GatherND", held.records, over(f, places, [2]), batch_dims=1)  # [rows,L,width]
    lag = f("Sub", over(f, position, [1, 2]), held.since)
    mine = f("LessOrEqual", ages[None, None, None], over(f, lag, [3]))  # [rows,Hv,Dv,L]
    most = over(f, f("ReduceMax", lag, [1, 2], keepdims=0), [1])
    live = over(f, f("LessOrEqual", ages[None], most), [2])  # [rows,L,1]
    g = f("Where", live, _part(f, records, ring.decays, h.values), 0.0)
    g = over(f, f("Transpose", g, perm=[0, 2, 1]), [2])  # [rows,Hv,1,L]
    later = np.tril(np.ones((ring.length, ring.length), np.bool_), -1)
    after = f("ReduceSum", f("Where", later, g, 0.0), [3], keepdims=0)
    delta = f("Reshape", _part(f, records, 0, ring.keys), [0, ring.length, h.values, h.value_dim])
    delta = f("Mul", f("Transpose", delta, perm=[0, 2, 3, 1]), over(f, f("Exp", after), [2]))
    delta = f("Where", mine, delta, 0.0)
    total = f("Exp", f("ReduceSum", f("Where", mine, g, 0.0), [3], keepdims=1))
    added = f("MatMul", delta, _keys(f, ring, f("Where", live, records, 0.0)))
    return f("Add", f("Mul", held.state, total), added)


def _fold_recorded(f: Text, held: Held, position: str, there: str) -> Held:
    """Folds what is due after the recorded token at `position`, in rows that are `there`."""
    ring, h = held.ring, held.ring.heads
    place = f("Mod", over(f, position, [1]), ring.records)
    record = f("GatherND", held.records, over(f, place, [2]), batch_dims=1)  # [rows,1,width]
    delta = f("Reshape", _part(f, record, 0, ring.keys), [0, h.values, h.value_dim])
    k = f("Reshape", _part(f, record, ring.keys, h.keys * h.key_dim), [0, h.keys, 1, h.key_dim])
    k = f("Expand", k, [1, 1, h.repeat, 1])
    k = f("Reshape", k, [0, h.values, h.key_dim])
    g = f("Reshape", _part(f, record, ring.decays, h.values), [0, h.values, 1])
    new = advanced(f, before(f, held, position), delta, k, f("Exp", g))
    return fold(f, held, position, there, new)


def advanced(f: Text, state: str, delta: str, k: str, decay: str) -> str:
    """The state after a token: decay [rows,Hv,1], δ [rows,Hv,Dv], k [rows,Hv,Dk]."""
    outer = f("MatMul", over(f, delta, [3]), over(f, k, [2]))
    return f("Add", f("Mul", state, over(f, decay, [3])), outer)


def fold(f: Text, held: Held, position: str, there: str, new: str) -> Held:
    """`new`, the state after the token at `position`, where it is due in rows that are `there`."""
    due = f("Equal", phases(f, held.ring, position), held.ring.length - 1)
    due = f("Or", due, over(f, f("Equal", position, 0), [1, 2]))
    due = f("And", due, over(f, there, [1, 2]))
    if held.dtype is not DType.F32:
        new = f.cast(narrowed(f, new, held.dtype), DType.F32)
    state = f("Where", over(f, due, [3]), new, held.state)
    since = f("Where", due, over(f, f("Add", position, 1), [1, 2]), held.since)
    return replace(held, state=state, since=since)


def append(f: Text, held: Held, position: str, there: str, token: tuple[str, str, str]) -> Held:
    """Records a token's (δ [rows,Hv,Dv], k [rows,Hv,Dk], g [rows,Hv,1]) where one is `there`."""
    ring, h, (delta, k, g) = held.ring, held.ring.heads, token
    k = f("Reshape", k, [0, h.keys, h.repeat, h.key_dim])
    k = f("Reshape", f("Slice", k, [0], [1], [2]), [0, h.keys * h.key_dim])  # of a key head once
    parts = f("Reshape", delta, [0, ring.keys]), k, f("Squeeze", g, [2])
    place = f("Mod", over(f, position, [1]), ring.records)
    old = f("GatherND", held.records, over(f, place, [2]), batch_dims=1)
    padding = f("Slice", old, [ring.used], [ring.width], [2])
    record = f("Concat", over(f, f("Concat", *parts, axis=1), [1]), padding, axis=2)
    here = f("Equal", np.arange(ring.records)[None], place)
    here = over(f, f("And", here, over(f, there, [1])), [2])
    return replace(held, records=f("Where", here, record, held.records))


def end_round(f: Text, held: Held, rows: Rows, has: str, out: str) -> None:
    """Writes the records to `out`, and the header or `base` where a row `has` tokens, [rows]."""
    ring, slots = held.ring, over(f, rows.slots, [1])
    if not ring.drafts:
        changed = f("ScatterND", "gdn_ring", slots, held.records)
        found = f("Reshape", held.rest, [-1])
        base = f("Where", f("And", has, rows.fresh), 1.0, found)
        _store_base(f, ring, rows.slots, changed, base, out)
        return
    base = f("Where", rows.fresh, 1, _number(f, rows, held.rest, ring.heads.values))
    last = _header(f, held, f("Add", rows.starts, 1), base)
    last = f("Where", over(f, has, [1, 2]), last, held.rest)
    f("ScatterND", "gdn_ring", slots, f("Concat", held.records, last, axis=1), out=out)


def settle(f: Text, held: Held, rows: Rows, out: str) -> None:
    """Writes to `out` that the tiles are folded, where a sequence ends and a tile saves."""
    ring, end = held.ring, f("Add", rows.starts, rows.counts)
    both = f("Concat", final_slots(f, rows), rows.saves, axis=0)
    if not ring.drafts:
        # Never the old one; but the ring, which may be the output's memory, is read before this.
        inert, found = f("Less", rows.starts, 0), f("Reshape", held.rest, [-1])
        base = f("Where", inert, found, f.cast(end, DType.F32))
        _store_base(f, ring, both, "gdn_ring", f("Concat", base, base, axis=0), out)
        return
    last = f("Squeeze", _header(f, held, end, end), [1])
    where = f("Pad", over(f, both, [1]), [0, 0, 0, 1], ring.records)
    f("ScatterND", "gdn_ring", where, f("Concat", last, last, axis=0), out=out)


def _header(f: Text, held: Held, done: str, base: str) -> str:
    """f32 [rows,1,width] of `done` and `base`, both int64 [rows]."""
    values = held.ring.heads.values
    numbers = [f("Expand", over(f, x, [1, 2]), [1, 1, values]) for x in (done, base)]
    rest = f("Slice", held.rest, [2 * values], [held.ring.width], [2])
    return f("Concat", *(f.cast(n, DType.F32) for n in numbers), rest, axis=2)


def _store_base(f: Text, ring: Ring, slots: str, records: str, base: str, out: str) -> None:
    """`records` with `base` f32 [rows] at the slots, written to `out`."""
    place = np.asarray([[0, ring.width - 1]])
    where = f("Add", f("Pad", over(f, slots, [1]), [0, 0, 0, 2]), np.pad(place, ((0, 0), (1, 0))))
    f("ScatterND", records, where, base, out=out)
