"""The rows of states and tables that one launch reaches, cut out and put back.

A reference gives back every state whole. Over all slots and pages of a served engine that would
copy gigabytes for each node; over those of a launch's own sequences it is as much as they hold.
Knows the launch's inputs by docs/graph.md and each state's unit; computes nothing.
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
    """Numbers of axis 0, ascending, and the last one's, which is scratch.

    Attributes:
        rows: of slots, then of snapshots; a number's place here is its number in what is cut.
        pages: the same of pages.
        slots: how many of `rows` are slots.
    """

    rows: Index
    pages: Index
    slots: int
    _axes: Mapping[str, Index]

    @classmethod
    def of(cls, buffers: Buffers, limits: Limits, states: Sequence[StateInfo]) -> LiveRows:
        """Those of a launch: the rows that its inputs name, and the pages of its slots."""
        named = [buffers[name].astype(np.int64) for name in ROWS if name in buffers]
        every = np.unique(np.concatenate(named))
        rows = every[every >= 0]
        slots = rows[rows < limits.max_seqs]
        held = buffers[PAGES][slots]
        pages = np.unique(held[_legal(held, limits.pages)]).astype(np.int64)
        # A table or a state of slots has no row of a snapshot: the scratch one stands for it.
        by_slot = np.append(np.minimum(rows, limits.max_seqs), limits.max_seqs)
        axes = {spec.name: by_slot for spec in tables(limits)}
        for info in states:
            last = info.spec.dims[0] - 1
            by_unit = {PAGE: np.append(pages, last), SLOT: by_slot}
            axes[info.spec.name] = by_unit.get(info.unit, np.append(rows, last))
        return cls(rows, pages, len(slots), axes)

    def cut(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        """An input or a state of the launch, whole, as the launch over these rows has it: a copy,
        or the array where it has none of the axes."""
        if name in ROWS:
            return _renumbered(array, self.rows)
        axis = self._axes.get(name)
        if axis is None:
            return array
        return _renumbered(array[axis], self.pages) if name == PAGES else array[axis]

    def put(self, name: str, buffer: NDArray[Any], value: NDArray[Any]) -> None:
        """Writes a state's rows back to where they were cut from."""
        axis = self._axes[name]
        own = axis[:-1] < axis[-1]  # a snapshot has no row of its own in a state of slots
        buffer[axis[:-1][own]] = value[:-1][own]
        buffer[axis[-1]] = value[-1]


def _legal(pages: NDArray[Any], count: int) -> NDArray[np.bool_]:
    legal: NDArray[np.bool_] = (pages >= 0) & (pages < count)
    return legal


def _renumbered(array: NDArray[Any], numbers: Index) -> NDArray[Any]:
    """The place of each value in `numbers`; what is not there names nothing, and stays."""
    at = np.searchsorted(numbers, array).clip(max=max(len(numbers) - 1, 0))
    known = numbers[at] == array if len(numbers) else np.zeros(array.shape, np.bool_)
    return np.where(known, at, array).astype(array.dtype)
