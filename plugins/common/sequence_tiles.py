"""What the ops over sequences share: rows, tiles, and which tile continues which.

The rules are those of docs/graph.md, "Rules of a prefill launch". Knows no op's maths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.tensors import Array


def continues(slots: Array, row: int) -> bool:
    """Whether tile `row` carries on where tile `row - 1` of the same launch stopped."""
    return bool(row > 0 and slots[row] >= 0 and slots[row] == slots[row - 1])


def ends(slots: Array, row: int) -> bool:
    """Whether tile `row` is its sequence's last tile in this launch."""
    return bool(slots[row] >= 0 and not (row + 1 < len(slots) and continues(slots, row + 1)))


def state_rows(slots: Array, starts: Array, told: Sequence[Array]) -> tuple[Array, Array]:
    """i32 [rows] of a launch's states: (where each row begins from, where it saves to or −1).

    `told` are `sources` and `saves`, which prefills alone have. A row that begins from zeros or
    carries on says its own slot.
    """
    if not told:
        return slots, np.full_like(slots, -1)
    own = [starts[row] == 0 or continues(slots, row) for row in range(len(slots))]
    live = np.greater_equal(slots, 0)
    return np.where(own, slots, told[0]), np.where(live, told[1], -1)


@dataclass(frozen=True)
class Rows:
    """Names of per-row values in a body, all [rows]; integers are int64.

    Attributes:
        slots: −1 where inert. starts: never negative, 0 where inert. counts: 0 where inert.
        live: bool. fresh: bool, the old state does not count (position 0, or inert).
        sources: the state's row that the row begins from; its slot, but for some of a prefill.
        saves: the state's row that it is also left in after a tile, or −1; "" but for a prefill.
    """

    slots: str
    starts: str
    counts: str
    live: str
    fresh: str
    sources: str = ""
    saves: str = ""


def read_rows(f: Text, slots: str, starts: str, counts: str) -> Rows:
    """Widens the step inputs and makes inert rows harmless whatever they hold."""
    slot = f.long(slots)
    live = f("GreaterOrEqual", slot, 0)
    start = f("Where", live, f.long(starts), 0)
    count = f("Where", live, f.long(counts), 0)
    return Rows(slot, start, count, live, f("Equal", start, 0), slot)


def read_tiles(f: Text, count: int) -> Rows:
    """The step inputs of a prefill's ops over states that remember a sequence."""
    rows = read_rows(f, "slots", "starts", "counts")
    own = f("Or", rows.fresh, continuing(f, rows, count))
    sources = f("Where", own, rows.slots, f.long("sources"))
    return replace(rows, sources=sources, saves=f("Where", rows.live, f.long("saves"), -1))


def valid_tokens(f: Text, rows: Rows, tile: int) -> str:
    """bool [rows, tile]: the token exists."""
    return f("Less", np.arange(tile)[None], f("Unsqueeze", rows.counts, [1]))


def positions(f: Text, rows: Rows, tile: int) -> str:
    """int64 [rows, tile]: the position of each token in its sequence."""
    return f("Add", f("Unsqueeze", rows.starts, [1]), np.arange(tile)[None])


def continuing(f: Text, rows: Rows, count: int) -> str:
    """bool [rows]: the tile carries on where the one before it stopped."""
    before = f("Concat", [-1], f("Slice", rows.slots, [0], [count - 1], [0]), axis=0)
    return f("And", rows.live, f("Equal", before, rows.slots))


def final_slots(f: Text, rows: Rows, count: int) -> str:
    """int64 [rows]: the slot where the tile ends its sequence's part of the launch, else −1."""
    after = f("Concat", f("Slice", rows.slots, [1], [count], [0]), [-1], axis=0)
    return f("Where", f("Equal", after, rows.slots), -1, rows.slots)


def store_tiles(f: Text, rows: Rows, count: int, state: str, new: str, out: str) -> None:
    """`state` with every tile's `new` [rows, …] where a sequence ends and where a tile saves."""
    where = over(f, f("Concat", final_slots(f, rows, count), rows.saves, axis=0), [1])
    f("ScatterND", state, where, f("Concat", new, new, axis=0), out=out)


def over(f: Text, flags: str, axes: list[int]) -> str:
    """Per-row flags reshaped to broadcast over `axes`."""
    return f("Unsqueeze", flags, axes)
