"""Extracts the rows that one launch uses, also those of states and tables, and writes them back.

A reference computes every row of a bucket, and returns every state whole. In a nearly empty bucket
most rows are padding, and with all slots and pages of a served engine each node would copy
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
PAGE, SLOT, IMAGE = "page", "slot", "image"  # units of states (`spark_engine/manifest.py`)
ROWS = ("slots", "sources", "saves")  # inputs that name rows of states
PAGES = "page_table"  # the table that names pages


@dataclass(frozen=True)
class LiveRows:
    """The parts of a launch's arrays along axis 0."""

    given: int  # rows of the bucket
    taken: int  # rows up to the last that has a slot, at least one
    tile: int  # tokens of a row
    # Of slots, then of snapshots; the index of a number is its number in the extracted states.
    rows: Index
    pages: Index  # of pages, likewise
    # By table and state, the extracted numbers along axis 0, scratch included.
    axes: Mapping[str, Index]

    @classmethod
    def of(
        cls, buffers: Buffers, limits: Limits, states: Sequence[StateInfo], near: int = 0
    ) -> LiveRows:
        """The parts of a launch: its rows up to the last live one; the rows of states and tables
        that its inputs name, the pages of its slots, and all neighbours within `near` of these."""
        named = np.concatenate([buffers[name] for name in ROWS if name in buffers])
        own = _with_near(named, limits.sequence_rows - 1, 0)
        held = buffers[PAGES][own[own < limits.max_seqs]]
        rows = _with_near(own, limits.sequence_rows - 1, near)
        pages = _with_near(held, limits.pages, near)
        # A table or a state of slots has no row of a snapshot: the scratch row replaces it.
        by_slot = np.append(np.minimum(rows, limits.max_seqs), limits.max_seqs)
        axes = {spec.name: by_slot for spec in tables(limits)}
        for info in states:
            last = info.spec.dims[0] - 1
            by_unit = {PAGE: np.append(pages, last), SLOT: by_slot, IMAGE: np.array([last])}
            axes[info.spec.name] = by_unit.get(info.unit, np.append(rows, last))
        given = len(buffers["slots"])
        live = np.flatnonzero(buffers["slots"] >= 0)
        taken, tile = int(live.max(initial=0)) + 1, len(buffers["token_ids"]) // given
        return cls(given, taken, tile, rows, pages, axes)

    def cut(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        """The extracted part of a whole input or state of the launch: a copy, or a view of a step
        input without numbers in it."""
        axis = self.axes.get(name)
        if axis is None:
            part = array[: self._part(array)]
            return _renumbered(part, self.rows) if name in ROWS else part
        cut: NDArray[Any] = array[axis]
        return _renumbered(cut, self.pages) if name == PAGES else cut

    def _part(self, array: NDArray[Any]) -> int:
        """The extracted length of an axis that counts rows, or tokens of rows."""
        return len(array) // self.given * self.taken

    def padded(self, array: NDArray[Any]) -> NDArray[Any]:
        """A value of the extracted rows, or of their tokens, extended with zeros to the whole
        bucket; another value unchanged."""
        if not array.ndim or len(array) not in (self.taken, self.taken * self.tile):
            return array
        whole = np.zeros((len(array) // self.taken * self.given, *array.shape[1:]), array.dtype)
        whole[: len(array)] = array
        return whole

    def put_output(self, buffer: NDArray[Any], value: NDArray[Any]) -> None:
        """Writes an output, with 0 in rows that were not extracted: their values are
        unspecified."""
        part = self._part(buffer)
        buffer[:part] = value
        buffer[part:] = 0

    def put(self, name: str, buffer: NDArray[Any], value: NDArray[Any]) -> None:
        """Writes a state's extracted rows back."""
        buffer[self.numbers(name)] = self.owned(name, value)
        buffer[self.axes[name][-1]] = value[-1]

    def numbers(self, name: str) -> Index:
        """The extracted rows of a table or a state, without the scratch row and without rows of
        snapshots that it lacks."""
        axis = self.axes[name]
        numbers: Index = axis[axis < axis[-1]]
        return numbers

    def owned(self, name: str, value: NDArray[Any]) -> NDArray[Any]:
        """These rows of the extracted array."""
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
    """The index of each value in `numbers`; -1 for a missing one."""
    if not len(numbers):
        return np.full_like(array, -1)
    at = np.searchsorted(numbers, array).clip(max=len(numbers) - 1)
    return np.where(numbers[at] == array, at, -1).astype(array.dtype)
