"""The rows, states and tables that one launch uses: cut out of the bucket, and written back.

A reference computes every row of a bucket and returns every state whole. In a nearly empty bucket
most of that is padding, and with all slots and pages of a served engine each node would copy
gigabytes. Knows the launch's inputs by docs/graph.md and each state's unit; computes nothing.
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
        given: rows of the bucket; `taken`: rows up to the last with a slot, at least one.
        tile: tokens of a row.
        rows: slots, then snapshots; the index of a number here is its number in the cut arrays.
        pages: the same for pages.
        axes: for each table and state, the numbers that are cut out of it, scratch included.
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
        """Those of a launch: its rows up to the last live one, the rows of states and tables that
        its inputs name, the pages of its slots, and rows and pages whose numbers are within
        `near` of these.
        """
        named = np.concatenate([buffers[name] for name in ROWS if name in buffers])
        own = _with_near(named, limits.sequence_rows - 1, 0)
        held = buffers[PAGES][own[own < limits.max_seqs]]
        rows = _with_near(own, limits.sequence_rows - 1, near)
        pages = _with_near(held, limits.pages, near)
        # A table or a state of slots has no snapshot rows: its scratch row replaces them.
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
        """A whole input or state of the launch, reduced to these rows: a copy, or a view of a step
        input that contains no numbers.
        """
        axis = self.axes.get(name)
        if axis is None:
            part = array[: self._part(array)]
            return _renumbered(part, self.rows) if name in ROWS else part
        cut: NDArray[Any] = array[axis]
        return _renumbered(cut, self.pages) if name == PAGES else cut

    def _part(self, array: NDArray[Any]) -> int:
        """How much is taken of an array that has one entry per row, or per token."""
        return len(array) // self.given * self.taken

    def padded(self, array: NDArray[Any]) -> NDArray[Any]:
        """A value of the taken rows, or of their tokens, extended with zeros to the whole bucket;
        any other value unchanged.
        """
        if not array.ndim or len(array) not in (self.taken, self.taken * self.tile):
            return array
        whole = np.zeros((len(array) // self.taken * self.given, *array.shape[1:]), array.dtype)
        whole[: len(array)] = array
        return whole

    def put_output(self, buffer: NDArray[Any], value: NDArray[Any]) -> None:
        """Writes an output; 0 in rows that were not taken, whose values are unspecified."""
        part = self._part(buffer)
        buffer[:part] = value
        buffer[part:] = 0

    def put(self, name: str, buffer: NDArray[Any], value: NDArray[Any]) -> None:
        """Writes the rows of a state back to their places."""
        buffer[self.numbers(name)] = self.owned(name, value)
        buffer[self.axes[name][-1]] = value[-1]

    def numbers(self, name: str) -> Index:
        """The numbers of the rows that a table or a state has itself: all that were cut except the
        scratch row, and except snapshots if it has none.
        """
        axis = self.axes[name]
        numbers: Index = axis[axis < axis[-1]]
        return numbers

    def owned(self, name: str, value: NDArray[Any]) -> NDArray[Any]:
        """Those rows of a cut array."""
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
    """The index of each value in `numbers`; -1, which names nothing, if it is not there."""
    if not len(numbers):
        return np.full_like(array, -1)
    at = np.searchsorted(numbers, array).clip(max=len(numbers) - 1)
    return np.where(numbers[at] == array, at, -1).astype(array.dtype)
