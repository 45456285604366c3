"""What one launch reaches, cut out and put back: its rows, and those of states and tables.

A reference computes every row of a bucket, and gives back every state whole. Of a bucket that is
nearly empty most of that is padding, and over all slots and pages of a served engine each node
would copy gigabytes. Knows the launch's inputs by docs/graph.md and each state's unit; computes
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spark_engine.interface import Limits, tables
from spark_engine.manifest import StateInfo

Buffers = Mapping[str, NDArray[Any]]
Index = NDArray[np.int64]
PAGE, SLOT = "page", "slot"  # units of states (`spark_engine/manifest.py`)
ROWS = ("slots", "sources", "saves")  # inputs that name rows of states
PAGES = "page_table"  # the table that names pages


@dataclass(frozen=True)
class LiveRows:
    """The parts of a launch's arrays along axis 0.

    Attributes:
        given: rows of the bucket, and `taken`: those up to the last that has a slot, at least one.
        tile: tokens of a row.
        rows: of slots, then of snapshots; a number's place here is its number in what is cut.
        pages: the same of pages.
        axes: of each table and state, the numbers of what is cut of it, scratch among them.
    """

    given: int
    taken: int
    tile: int
    rows: Index
    pages: Index
    axes: Mapping[str, Index]

    @classmethod
    def of(
        cls, buffers: Buffers, limits: Limits, states: Sequence[StateInfo], near: int = 0
    ) -> LiveRows:
        """Those of a launch: its rows up to the last live one, and of states and tables the rows
        that its inputs name, the pages of its slots, and those whose numbers are up to `near` lower
        or higher."""
        named = np.concatenate([buffers[name] for name in ROWS if name in buffers])
        own = _with_near(named, limits.sequence_rows - 1, 0)
        held = buffers[PAGES][own[own < limits.max_seqs]]
        rows = _with_near(own, limits.sequence_rows - 1, near)
        pages = _with_near(held, limits.pages, near)
        # A table or a state of slots has no row of a snapshot: the scratch one stands for it.
        by_slot = np.append(np.minimum(rows, limits.max_seqs), limits.max_seqs)
        axes = {spec.name: by_slot for spec in tables(limits)}
        for info in states:
            last = info.spec.dims[0] - 1
            by_unit = {PAGE: np.append(pages, last), SLOT: by_slot}
            axes[info.spec.name] = by_unit.get(info.unit, np.append(rows, last))
        given = len(buffers["slots"])
        live = np.flatnonzero(buffers["slots"] >= 0)
        taken, tile = int(live.max(initial=0)) + 1, len(buffers["token_ids"]) // given
        return cls(given, taken, tile, rows, pages, axes)

    def cut(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        """An input or a state of the launch, whole, as the launch over these rows has it: a copy,
        or a part of a step input that names none."""
        axis = self.axes.get(name)
        if axis is None:
            part = array[: self._part(array)]
            return _renumbered(part, self.rows) if name in ROWS else part
        cut: NDArray[Any] = array[axis]
        return _renumbered(cut, self.pages) if name == PAGES else cut

    def _part(self, array: NDArray[Any]) -> int:
        """How much is taken of what counts rows, or the tokens of rows."""
        return len(array) // self.given * self.taken

    def padded(self, array: NDArray[Any]) -> NDArray[Any]:
        """A value of the rows that were taken, or of their tokens, as one of the whole bucket, with
        zeros behind; any other as it is."""
        if not array.ndim or len(array) not in (self.taken, self.taken * self.tile):
            return array
        whole = np.zeros((len(array) // self.taken * self.given, *array.shape[1:]), array.dtype)
        whole[: len(array)] = array
        return whole

    def put_output(self, buffer: NDArray[Any], value: NDArray[Any]) -> None:
        """Writes an output; 0 of rows that were not taken, whose values are unspecified."""
        part = self._part(buffer)
        buffer[:part] = value
        buffer[part:] = 0

    def put(self, name: str, buffer: NDArray[Any], value: NDArray[Any]) -> None:
        """Writes a state's rows back to where they were cut from."""
        buffer[self.numbers(name)] = self.owned(name, value)
        buffer[self.axes[name][-1]] = value[-1]

    def numbers(self, name: str) -> Index:
        """Of the rows that a table or a state has of its own: all that were cut but the scratch
        one, and where it has none of snapshots, but those."""
        axis = self.axes[name]
        numbers: Index = axis[axis < axis[-1]]
        return numbers

    def owned(self, name: str, value: NDArray[Any]) -> NDArray[Any]:
        """These rows of what was cut."""
        axis = self.axes[name]
        own: NDArray[Any] = value[axis < axis[-1]]
        return own


def _with_near(numbers: NDArray[Any], count: int, near: int) -> Index:
    """The numbers from 0 to `count` that are within `near` of a given one, ascending."""
    legal = np.unique(numbers[(numbers >= 0) & (numbers < count)]).astype(np.int64)
    if near >= count:
        return np.arange(count)
    around = np.unique(legal[:, None] + np.arange(-near, near + 1))
    return around[(around >= 0) & (around < count)]


def _renumbered(array: NDArray[Any], numbers: Index) -> NDArray[Any]:
    """The place of each value in `numbers`; -1, which names nothing, of one that is not there."""
    if not len(numbers):
        return np.full_like(array, -1)
    at = np.searchsorted(numbers, array).clip(max=len(numbers) - 1)
    return np.where(numbers[at] == array, at, -1).astype(array.dtype)
