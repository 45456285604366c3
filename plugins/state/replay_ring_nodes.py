"""Nodes of a replay ring in a body: the state caught up, and a token's record.

The sums are written out in full (a state is materialised), as fits the CPU. Records are in the
ring's order; what is not live is zero before it is used. Knows the layout of `replay_ring`; knows
no op.
"""

from dataclasses import dataclass

import numpy as np

from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.sequence_tiles import Rows, final_slots, over
from spark_engine.plugins.state.replay_ring import F16_MAX, Ring
from spark_engine.tensors import DType


@dataclass(frozen=True)
class Lag:
    """Names: the stored state and ring of every row, and the state the rows mean, all f32."""

    stored: str  # [rows,Hv,Dv,Dk]
    records: str  # [rows,L,width]
    state: str  # [rows,Hv,Dv,Dk]


def narrowed(f: Text, state: str, dtype: DType) -> str:
    """A state f32 as it is stored: f16 saturates, and a NaN stays one."""
    if dtype is DType.F16:
        state = f("Min", f("Max", state, -F16_MAX), F16_MAX)
    return f.cast(state, dtype)


def catch_up(f: Text, ring: Ring, rows: Rows, state: str, records: str) -> Lag:
    """Gathers the rows' states and rings and adds the one to the other; zero where fresh."""
    h, length = ring.heads, ring.length
    fresh = over(f, rows.fresh, [1, 2, 3])
    stored = f("Where", fresh, 0.0, f.cast(f("Gather", state, rows.sources), DType.F32))
    held = f("Gather", records, rows.sources)
    base = f("Where", rows.fresh, 0.0, base_of(f, ring, held))
    lag = f("Sub", rows.starts, f.long(base))  # tokens since all was folded
    newest = f("Sub", over(f, rows.starts, [1]), np.arange(1, length + 1)[None])
    age = f("Add", f("Mod", newest, length), 1)  # [rows, L] of record r: 1 the newest
    live = f("LessOrEqual", age, over(f, f("Min", lag, length - 1), [1]))  # age L is overwritten
    behind = f("Min", over(f, lag, [1, 2]), phases(f, ring, rows.starts))  # [rows, Hv, Dv]
    mine = f("LessOrEqual", over(f, age, [1, 2]), over(f, behind, [3]))  # [rows, Hv, Dv, L]
    dead = over(f, live, [2])
    g = f("Where", dead, part(f, held, ring.decays, h.values), 0.0)  # [rows, L, Hv]
    g = f("Transpose", g, perm=[0, 2, 1])
    later = f("Less", over(f, age, [1]), over(f, age, [2]))  # [rows, r, r']: r' after r
    since = f("Where", over(f, later, [1]), over(f, g, [2]), 0.0)  # [rows, Hv, L, L]
    decay = f("Exp", f("ReduceSum", since, [3], keepdims=0))  # [rows, Hv, L]
    delta = part(f, held, 0, ring.keys)
    delta = f("Reshape", delta, [0, length, h.values, h.value_dim])
    delta = f("Mul", f("Transpose", delta, perm=[0, 2, 3, 1]), over(f, decay, [2]))
    delta = f("Where", mine, delta, 0.0)
    total = f("Where", mine, over(f, g, [2]), 0.0)
    total = f("Exp", f("ReduceSum", total, [3], keepdims=1))  # [rows, Hv, Dv, 1]
    added = f("MatMul", delta, keys(f, ring, f("Where", dead, held, 0.0)))
    now = f("Add", f("Mul", stored, total), added)
    return Lag(stored, held, f("Where", fresh, 0.0, now))


def base_of(f: Text, ring: Ring, records: str) -> str:
    """f32 [rows]: as stored."""
    last = f("Slice", records, [0, ring.width - 1], [1, ring.width], [1, 2])
    return f("Reshape", last, [-1])


def phases(f: Text, ring: Ring, position: str) -> str:
    """int64 [rows, Hv, Dv]: (position + group) mod L."""
    return f("Mod", f("Add", over(f, position, [1, 2]), ring.groups[None]), ring.length)


def part(f: Text, records: str, offset: int, width: int) -> str:
    """[rows, L, width]: so many columns of every record."""
    return f("Slice", records, [offset], [offset + width], [2])


def keys(f: Text, ring: Ring, records: str) -> str:
    """[rows, Hv, L, Dk]: each key head's `repeat` times in a row."""
    h = ring.heads
    k = part(f, records, ring.keys, h.keys * h.key_dim)
    k = f("Reshape", k, [0, ring.length, h.keys, h.key_dim])
    k = f("Unsqueeze", f("Transpose", k, perm=[0, 2, 1, 3]), [2])  # [rows, Hk, 1, L, Dk]
    k = f("Expand", k, [1, 1, h.repeat, 1, 1])
    return f("Reshape", k, [0, h.values, ring.length, h.key_dim])


def folds(f: Text, ring: Ring, rows: Rows) -> str:
    """bool [rows, Hv, Dv, 1]: the rows of the state that this step rewrites."""
    due = f("Equal", phases(f, ring, rows.starts), ring.length - 1)
    due = f("And", due, over(f, f("Greater", rows.counts, 0), [1, 2]))
    return over(f, f("Or", due, over(f, rows.fresh, [1, 2])), [3])


def append(
    f: Text, ring: Ring, rows: Rows, lag: Lag, token: tuple[str, str, str], out: str
) -> None:
    """Writes the token's (δ [rows,Hv,Dv], k [rows,Hv,Dk], g [rows,Hv,1]) into its record of
    `gdn_ring`, and `base` where the row is fresh; a row without a token changes nothing."""
    at = f("Mod", rows.starts, ring.length)
    old = f("GatherND", lag.records, over(f, at, [1]), batch_dims=1)  # [rows, width]
    parts = flat(f, ring, token)
    rest = f("Slice", old, [ring.used], [ring.width], [1])
    record = f("Concat", *parts, rest, axis=1)
    has = f("Greater", rows.counts, 0)
    record = f("Where", over(f, has, [1]), record, old)
    where = f("Concat", over(f, rows.slots, [1]), over(f, at, [1]), axis=1)
    changed = f("ScatterND", "gdn_ring", where, record)
    base = f("Where", f("And", has, rows.fresh), 1.0, base_of(f, ring, lag.records))
    store_base(f, ring, rows.slots, changed, base, out)


def flat(f: Text, ring: Ring, token: tuple[str, str, str]) -> tuple[str, str, str]:
    """A token's (δ, k, g) as a record has them, each [rows, …]: k of each key head once."""
    h, (delta, k, g) = ring.heads, token
    k = f("Reshape", k, [0, h.keys, h.repeat, h.key_dim])
    k = f("Reshape", f("Slice", k, [0], [1], [2]), [0, h.keys * h.key_dim])
    return f("Reshape", delta, [0, ring.keys]), k, f("Squeeze", g, [2])


def settle(f: Text, ring: Ring, rows: Rows, n: int, lag: Lag, out: str) -> None:
    """Writes to `out` that the `n` tiles are folded, where a sequence ends and a tile saves."""
    end = f.cast(f("Add", rows.starts, rows.counts), DType.F32)
    # Never the old one; but the ring, which may be the output's memory, is read before this.
    inert = f("Less", rows.starts, 0)
    end = f("Where", inert, base_of(f, ring, lag.records), end)
    slots = f("Concat", final_slots(f, rows, n), rows.saves, axis=0)
    store_base(f, ring, slots, "gdn_ring", f("Concat", end, end, axis=0), out)


def store_base(f: Text, ring: Ring, slots: str, records: str, base: str, out: str) -> None:
    """`records` with `base` f32 [rows] at the slots, written to `out`."""
    place = np.asarray([[0, ring.width - 1]])
    where = f("Add", f("Pad", over(f, slots, [1]), [0, 0, 0, 2]), np.pad(place, ((0, 0), (1, 0))))
    f("ScatterND", records, where, base, out=out)
