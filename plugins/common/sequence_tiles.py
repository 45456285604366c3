"""Shared by the ops over sequences: rows, tiles, and the order of a sequence's tiles.

The rules are in docs/graph.md, "Rules of a prefill launch".
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.tensors import Array

END = np.iinfo(np.int64).max  # of a slice


def continues(slots: Array, row: int) -> bool:
    """True if tile `row` continues tile `row - 1` of the same launch."""
    return bool(row > 0 and slots[row] >= 0 and slots[row] == slots[row - 1])


def state_rows(slots: Array, starts: Array, prefill: Sequence[Array]) -> tuple[Array, Array]:
    """i32 [rows] twice, of a launch's states: the state from which each row begins, the one to
    which it saves or −1.

    `prefill`: `sources` and `saves`, or () in decode. A row that begins from zeros or continues
    another tile has its own slot as source.
    """
    if not prefill:
        return slots, np.full_like(slots, -1)
    own = [starts[row] == 0 or continues(slots, row) for row in range(len(slots))]
    live = np.greater_equal(slots, 0)
    return np.where(own, slots, prefill[0]), np.where(live, prefill[1], -1)


@dataclass(frozen=True)
class Rows:
    """Names of per-row values in a body, all [rows]; integers are int64.

    Attributes:
        slots: −1 where inert. starts: never negative, 0 where inert. counts: 0 where inert.
        live: bool. fresh: bool, the old state is ignored (position 0, or inert).
        sources: the row of the state from which the row begins; usually its slot.
        saves: a further row of the state to which a prefill tile writes, or −1; "" in decode.
    """

    slots: str
    starts: str
    counts: str
    live: str
    fresh: str
    sources: str = ""
    saves: str = ""


def read_rows(f: Text, slots: str, starts: str, counts: str) -> Rows:
    """Widens the step inputs, and replaces the values of inert rows by legal ones."""
    slot = f.long(slots)
    live = f("GreaterOrEqual", slot, 0)
    start = f("Where", live, f.long(starts), 0)
    count = f("Where", live, f.long(counts), 0)
    return Rows(slot, start, count, live, f("Equal", start, 0), slot)


def read_tiles(f: Text) -> Rows:
    """The step inputs of a prefill's ops over recurrent states."""
    rows = read_rows(f, "slots", "starts", "counts")
    own = f("Or", rows.fresh, continuing(f, rows))
    sources = f("Where", own, rows.slots, f.long("sources"))
    return replace(rows, sources=sources, saves=f("Where", rows.live, f.long("saves"), -1))


def valid_tokens(f: Text, rows: Rows, tile: int) -> str:
    """bool [rows, tile]: the token exists."""
    return f("Less", np.arange(tile)[None], f("Unsqueeze", rows.counts, [1]))


def positions(f: Text, rows: Rows, tile: int) -> str:
    """int64 [rows, tile]: the position of each token in its sequence."""
    return f("Add", f("Unsqueeze", rows.starts, [1]), np.arange(tile)[None])


def continuing(f: Text, rows: Rows) -> str:
    """bool [rows]: the tile continues the one before it."""
    before = f("Concat", [-1], f("Slice", rows.slots, [0], [-1], [0]), axis=0)
    return f("And", rows.live, f("Equal", before, rows.slots))


def final_slots(f: Text, rows: Rows) -> str:
    """int64 [rows]: the slot, if the tile is its sequence's last in the launch; else −1."""
    after = f("Concat", f("Slice", rows.slots, [1], [END], [0]), [-1], axis=0)
    return f("Where", f("Equal", after, rows.slots), -1, rows.slots)


def store_tiles(f: Text, rows: Rows, state: str, new: str, out: str) -> None:
    """`state` with `new` [rows, …] in the rows of last tiles' slots and of tiles' `saves`."""
    where = over(f, f("Concat", final_slots(f, rows), rows.saves, axis=0), [1])
    f("ScatterND", state, where, f("Concat", new, new, axis=0), out=out)


def over(f: Text, flags: str, axes: list[int]) -> str:
    """Per-row flags reshaped to broadcast over `axes`."""
    return f("Unsqueeze", flags, axes)


def expand_rows(f: Text, tile: int) -> Rows:
    """A row for each token; tokens beyond a row's count are inert."""
    rows = read_rows(f, "slots", "starts", "counts")
    if tile == 1:
        return rows
    valid = valid_tokens(f, rows, tile)
    slot = f("Where", valid, over(f, rows.slots, [1]), -1)
    start = f("Where", valid, positions(f, rows, tile), 0)
    slot, start, count, live = (f("Reshape", x, [-1]) for x in (slot, start, f.long(valid), valid))
    return Rows(slot, start, count, live, f("Equal", start, 0))


def page_ids(f: Text, rows: Rows, pages: int) -> str:
    """int64 [rows, MP]: page ids in the legal range; −1, the scratch page, for missing ones."""
    table = f("Clip", f.long(f("Gather", "page_table", rows.slots)), -1, pages - 1)
    return f("Where", over(f, rows.live, [1]), table, -1)
