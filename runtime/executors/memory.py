"""The arrays of an engine: states, tables, step inputs and outputs, allocated once.

Knows names, shapes and the unit that each axis counts; knows no op and no slot allocation. All
buckets of a family use the first rows of the same arrays. Tables, step inputs and outputs are host
arrays for every executor; states are in a `States`, which may keep them on a device.
"""

import mmap
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from spark_engine.errors import EngineError
from spark_engine.interface import STATE_OUT
from spark_engine.manifest import OF_SLOTS, PAGE, SEQUENCE, StateInfo, bytes_of, snapshot_rows
from spark_engine.runtime.executors.executor import Specs
from spark_engine.tensors import Array, TensorSpec

BucketKey = tuple[str, int]  # family, rows
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_FILL = {"page_table": -1, "bias_ids": -1}
COUNTS = "token_counts"
Changed = Mapping[str, Collection[int]]  # slots by table
Pairs = Collection[tuple[int, int]]  # (from, to)


@dataclass(frozen=True)
class Snapshot:
    """One sequence's states: its slot's rows and its pages, by state name."""

    rows: Mapping[str, Array]
    pages: Mapping[str, Array]  # axis 0: the sequence's pages in order

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for part in (self.rows, self.pages) for a in part.values())


class States(Protocol):
    """Storage of an engine's states, and copies of one sequence's part to and from the host.

    Attributes:
        arrays: the states by name; empty if the host cannot address them.
        slot_bytes, page_bytes: of one slot's rows, and of one page, over all states.
        snapshot_rows: rows of the states by sequence that belong to no slot; the first one follows
            the last slot's row.
        snapshot_bytes: of one such row over all states; 0 if the model has no recurrent state, so
            that pages alone make a prefix.
    """

    arrays: Mapping[str, Array]
    slot_bytes: int
    page_bytes: int
    snapshot_rows: int
    snapshot_bytes: int

    def copy_rows(self, pairs: Pairs) -> None:
        """Copies rows of the states by sequence, as (from, to), after all queued launches and
        before later ones. No two pairs write one row, and no pair reads a row that another pair
        writes."""

    def copy_pages(self, pairs: Pairs) -> None:
        """Copies pages of all states, as (from, to), in the same order."""

    def set_counts(self, slot: int, ids: Iterable[int], generated: Iterable[int] = ()) -> None:
        """Writes the slot's `token_counts` as `mark_tokens` leaves them after the prompt's `ids`
        and the generated ids, in the same order as the copies."""

    def save(self, slot: int, pages: Iterable[int]) -> Snapshot:
        """Copies one sequence's slot rows and pages to the host, after all queued launches."""

    def restore(self, snapshot: Snapshot, slot: int, pages: Iterable[int]) -> None:
        """Writes a snapshot into a slot and into as many pages as the snapshot has."""


@runtime_checkable
class PrefixStore(States, Protocol):
    """States with prefixes that can be copied to a disk: this process has all that is in them."""

    def save_prefix(
        self, pages: Iterable[int], names: Collection[str] = (), row: int = 0
    ) -> Snapshot:
        """As `save`, but of the states by sequence with these names alone."""


class TableSink(Protocol):
    """A device's copies of the tables."""

    def write(self, tables: Mapping[str, Array], changed: Changed) -> None:
        """Copies these rows to the device; later launches see them."""


class HostStates:
    def __init__(self, states: Iterable[StateInfo]) -> None:
        infos = tuple(states)
        self.arrays: Mapping[str, Array] = {info.spec.name: allocate(info.spec) for info in infos}
        self._by_slot = tuple(i.spec.name for i in infos if i.unit in OF_SLOTS)
        self._by_page = tuple(i.spec.name for i in infos if i.unit == PAGE)
        self._by_sequence = tuple(i.spec.name for i in infos if i.unit == SEQUENCE)
        self.slot_bytes = bytes_of(infos, *OF_SLOTS)
        self.page_bytes = bytes_of(infos, PAGE)
        self.snapshot_rows = snapshot_rows(infos)
        self.snapshot_bytes = bytes_of(infos, SEQUENCE)

    def copy_rows(self, pairs: Pairs) -> None:
        self._copy(self._by_sequence, pairs)

    def copy_pages(self, pairs: Pairs) -> None:
        self._copy(self._by_page, pairs)

    def set_counts(self, slot: int, ids: Iterable[int], generated: Iterable[int] = ()) -> None:
        self.arrays[COUNTS][slot] = counts_of(self.arrays[COUNTS].shape[1], ids, generated)

    def _copy(self, names: Iterable[str], pairs: Pairs) -> None:
        sources, targets = _columns(pairs)
        for name in names:
            self.arrays[name][targets] = self.arrays[name][sources]

    def save(self, slot: int, pages: Iterable[int]) -> Snapshot:
        return self.save_prefix(pages, self._by_slot, slot)

    def save_prefix(
        self, pages: Iterable[int], names: Collection[str] = (), row: int = 0
    ) -> Snapshot:
        where = np.fromiter(pages, np.intp)
        rows = {name: self.arrays[name][row].copy() for name in names}
        return Snapshot(rows, {name: self.arrays[name][where] for name in self._by_page})

    def restore(self, snapshot: Snapshot, slot: int, pages: Iterable[int]) -> None:
        where = np.fromiter(pages, np.intp)
        for name, row in snapshot.rows.items():
            self.arrays[name][slot] = row
        for name, saved in snapshot.pages.items():
            self.arrays[name][where] = saved


class EngineMemory:
    """The host arrays of one engine, and access to its states on the host or a device.

    `states` and `tables` hold one array each. Step inputs and outputs exist `sets` times, so that
    the host fills one step while the previous one runs. `store`: the states, given by an executor
    that keeps them on a device. `sink`: receives changed table rows. Raises EngineError if a
    bucket's specs do not fit the manifest's.
    """

    def __init__(
        self,
        states: Iterable[StateInfo],
        tables: Iterable[TensorSpec],
        buckets: Mapping[BucketKey, Specs],
        sets: int = 1,
        store: States | None = None,
        sink: TableSink | None = None,
    ) -> None:
        self.store: States = HostStates(states) if store is None else store
        self._apart = store is not None
        self.states = self.store.arrays
        self.tables = {spec.name: allocate(spec) for spec in tables}
        for name, value in _FILL.items():
            if name in self.tables:
                self.tables[name].fill(value)
        self._sink = sink
        # All rows at first: the device's tables are uninitialised.
        self._changed = {n: set(range(t.shape[0])) for n, t in self.tables.items() if sink}
        self._buffers = [self._make_set(buckets) for _ in range(sets)]

    def buffers(self, family: str, bucket: int, index: int) -> Mapping[str, Array]:
        """Every host array that this bucket reads and writes, by name; `index` selects the set."""
        return self._buffers[index][family, bucket]

    def mark(self, slot: int, names: Iterable[str] | None = None) -> None:
        """Marks the slot's row as changed in these tables, or in all tables."""
        for name in self._changed if names is None else names:
            if name in self._changed:
                self._changed[name].add(slot)

    def flush(self) -> None:
        """Sends the rows marked since the last flush to the device, if there is one."""
        changed = {name: slots for name, slots in self._changed.items() if slots}
        if changed and self._sink is not None:
            self._sink.write(self.tables, changed)
            self._changed = {name: set() for name in self._changed}

    def _make_set(self, buckets: Mapping[BucketKey, Specs]) -> dict[BucketKey, dict[str, Array]]:
        """Buffers of every bucket; the buckets of a family share the arrays of the largest one."""
        made: dict[BucketKey, dict[str, Array]] = {}
        for family in sorted({family for family, _ in buckets}):
            keys = sorted(key for key in buckets if key[0] == family)
            own = {s.name: allocate(s) for s in self._own(buckets[keys[-1]])}
            for key in keys:
                made[key] = self._bucket_buffers(key, buckets[key], own)
        return made

    def _own(self, specs: Specs) -> list[TensorSpec]:
        return [s for s in (*specs.inputs, *specs.outputs) if s.name not in self.tables]

    def _bucket_buffers(
        self, key: BucketKey, specs: Specs, own: Mapping[str, Array]
    ) -> dict[str, Array]:
        buffers = {s.name: own[s.name][: s.dims[0]] for s in self._own(specs)}
        shared = {**self.states, **self.tables}
        states = () if self._apart else specs.states
        for spec in (*states, *(s for s in specs.inputs if s.name in self.tables)):
            if spec.name not in shared:
                raise EngineError(f"{key}: state {spec.name} is not in the manifest; rebuild")
            buffers[spec.name] = shared[spec.name]
        for spec in states:
            buffers[spec.name + STATE_OUT] = shared[spec.name]
        for spec in (*specs.inputs, *states, *specs.outputs):
            found = buffers[spec.name]
            if (found.dtype, found.shape) != (spec.dtype.numpy, spec.dims):
                raise EngineError(
                    f"{key}: {spec.name} is {spec.dtype}{spec.dims} in the bucket and "
                    f"{found.dtype}{found.shape} in the manifest; rebuild the engine"
                )
        return buffers


def counts_of(vocab: int, ids: Iterable[int], generated: Iterable[int]) -> Array:
    """i32 [vocab]: twice the number of times that a token was generated, plus 1 if the prompt
    contains it."""
    counts = np.zeros(vocab, np.int32)
    np.add.at(counts, np.fromiter(generated, np.intp), 2)
    counts[np.fromiter(ids, np.intp)] |= 1
    return counts


def _columns(pairs: Pairs) -> tuple[Array, Array]:
    both = np.array([*pairs], np.intp).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def allocate(spec: TensorSpec) -> Array:
    """A zeroed array of this dtype and shape, on separate pages: they are taken when they are first
    written, and returned with the array."""
    pages = np.frombuffer(mmap.mmap(-1, max(spec.nbytes, 1), PRIVATE), np.uint8)
    view: Array = pages[: spec.nbytes].view(spec.dtype.numpy).reshape(spec.dims)
    return view
