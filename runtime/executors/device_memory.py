"""An engine's states and tables in device memory.

Knows the unit that each axis counts (slot, page, sequence) and copies rows and pages through pinned
memory. Knows no launch.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spark_engine.device.buffers import unit_bytes
from spark_engine.device.gpu import Event
from spark_engine.device.resources import DeviceResources
from spark_engine.manifest import OF_SLOTS, PAGE, SEQUENCE, StateInfo, bytes_of, snapshot_rows
from spark_engine.runtime.executors.memory import COUNTS, Changed, Pairs, Snapshot, counts_of
from spark_engine.tensors import Array, Bytes, TensorSpec

STAGE = 32 << 20  # bytes of pinned memory for copies of snapshots
MARKED = 4  # rows of token counts in flight at once
NEAR = 4096  # bytes: copying a gap of unchanged rows up to this size is faster than a second copy
Part = tuple[int, Bytes]  # device address, host bytes


class DeviceStates:
    """The states of an engine in device memory; `resources` frees them."""

    def __init__(
        self, resources: DeviceResources, states: Iterable[StateInfo], snapshots: int = 0
    ) -> None:
        self.arrays: Mapping[str, Array] = {}
        self._gpu = resources.gpu
        self._infos = tuple(states)
        self._by_slot = {i.spec.name for i in self._infos if i.unit in OF_SLOTS}
        more = {SEQUENCE: snapshots}
        self.addresses = {
            i.spec.name: resources.zeros(i.spec.nbytes + more.get(i.unit, 0) * i.row_bytes)
            for i in self._infos
        }
        self.slot_bytes = bytes_of(self._infos, *OF_SLOTS)
        self.page_bytes = bytes_of(self._infos, PAGE)
        self.snapshot_bytes = bytes_of(self._infos, SEQUENCE)
        self.snapshot_rows = snapshot_rows(self._infos) + snapshots if self.snapshot_bytes else 0
        self._stage = resources.pinned(STAGE)  # here, as pinning takes several steps' time
        self._counts = _Counts(resources, self.addresses, self._infos)

    def copy_rows(self, pairs: Pairs) -> None:
        self._copy(SEQUENCE, pairs)

    def copy_pages(self, pairs: Pairs) -> None:
        self._copy(PAGE, pairs)

    def set_counts(self, slot: int, ids: Iterable[int], generated: Iterable[int] = ()) -> None:
        self._gpu.use()
        self._counts.write(slot, list(ids), list(generated))

    def _copy(self, unit: str, pairs: Pairs) -> None:
        self._gpu.use()
        rows = [(self.addresses[i.spec.name], i.row_bytes) for i in self._infos if i.unit == unit]
        copies = ((at + to * n, at + source * n, n) for source, to in pairs for at, n in rows)
        self._gpu.copy_all([*copies])

    def save(self, slot: int, pages: Iterable[int]) -> Snapshot:
        return self.save_prefix(pages, self._by_slot, slot)

    def save_prefix(
        self, pages: Iterable[int], names: Collection[str] = (), row: int = 0
    ) -> Snapshot:
        rows, paged, where = {}, {}, list(pages)
        for info in self._infos:
            dims, dtype = info.spec.dims[1:], info.spec.dtype.numpy
            if info.spec.name in names:
                rows[info.spec.name] = np.empty(dims, dtype)
            elif info.unit == PAGE:
                paged[info.spec.name] = np.empty((len(where), *dims), dtype)
        snapshot = Snapshot(rows, paged)
        for batch in _batches(self._parts(snapshot, row, where)):
            stage = self._staged(batch)
            for (address, _), part in zip(batch, stage, strict=True):
                self._gpu.download(part, address)
            self._gpu.wait()
            for (_, host), part in zip(batch, stage, strict=True):
                host[:] = part
        return snapshot

    def restore(self, snapshot: Snapshot, slot: int, pages: Iterable[int]) -> None:
        for batch in _batches(self._parts(snapshot, slot, list(pages))):
            for (address, host), part in zip(batch, self._staged(batch), strict=True):
                part[:] = host
                self._gpu.upload(address, part)
            self._gpu.wait()

    def _parts(self, snapshot: Snapshot, slot: int, pages: list[int]) -> Iterator[Part]:
        """(device address, snapshot bytes) of every contiguous range of at most STAGE bytes;
        neighbouring pages are merged."""
        for info in self._infos:
            spec, size = info.spec, unit_bytes(info.spec)
            if spec.name in snapshot.rows:
                host, runs = snapshot.rows[spec.name], [(slot, 0, 1)]
            elif info.unit != PAGE:
                continue
            else:
                host, runs = snapshot.pages[spec.name], list(_runs(pages))
                if len(host) != len(pages):
                    raise ValueError(
                        f"{len(host)} pages in the snapshot, {len(pages)} pages to restore"
                    )
            source = raw(host)
            for unit, index, count in runs:
                part = source[index * size : (index + count) * size]
                at = self.addresses[spec.name] + unit * size
                for start in range(0, len(part), STAGE):
                    yield at + start, part[start : start + STAGE]

    def _staged(self, batch: list[Part]) -> list[Bytes]:
        """Consecutive ranges of the pinned memory, one for each part."""
        self._gpu.use()
        ends = np.cumsum([len(host) for _, host in batch]).tolist()
        return [self._stage[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]


class _Counts:
    """Writes rows of `token_counts` through MARKED pinned buffers in turn."""

    def __init__(
        self, resources: DeviceResources, addresses: Mapping[str, int], infos: Iterable[StateInfo]
    ) -> None:
        self._gpu = resources.gpu
        self._info = next((i for i in infos if i.spec.name == COUNTS), None)
        if self._info is None:
            return
        self._address, size = addresses[COUNTS], self._info.row_bytes
        stages = resources.pinned(MARKED * size).reshape(MARKED, -1)
        self._stages = [(stage.view(np.int32), resources.event()) for stage in stages]

    def write(self, slot: int, ids: Sequence[int], generated: Sequence[int]) -> None:
        """Counts the ids into the slot's row; without ids it zeroes the row on the device."""
        assert self._info is not None
        size = self._info.row_bytes
        at = self._address + slot * size
        if not (ids or generated):
            self._gpu.fill(at, 0, size)
            return
        stage, sent = self._stages[0]
        self._stages.append(self._stages.pop(0))
        self._gpu.wait_for(sent)
        stage[:] = counts_of(len(stage), ids, generated)
        self._gpu.upload(at, stage)
        self._gpu.record(sent)


@dataclass(frozen=True)
class _Stage:
    """Pinned copies of all tables. `copied`: the device has read the last staged rows."""

    tables: Mapping[str, Bytes]  # [rows, bytes]
    copied: Event


class DeviceTables:
    """The tables in device memory; `resources` frees them.

    Rows pass through two sets of pinned memory in turn. The copies of a step end before the step
    after the next one is planned, so a write never waits for a running step.
    """

    def __init__(self, resources: DeviceResources, specs: Iterable[TensorSpec]) -> None:
        self._gpu = resources.gpu
        kept = tuple(specs)
        self.addresses = {spec.name: resources.zeros(spec.nbytes) for spec in kept}
        self._stages = [
            _Stage(
                {s.name: resources.pinned(s.nbytes).reshape(s.dims[0], -1) for s in kept},
                resources.event(),
            )
            for _ in range(2)
        ]

    def write(self, tables: Mapping[str, Array], changed: Changed) -> None:
        """Queues copies of these rows; later launches see them."""
        self._gpu.use()
        self._stages.reverse()
        stage = self._stages[0]
        self._gpu.wait_for(stage.copied)
        for name, slots in changed.items():
            rows = stage.tables[name]
            width, source = rows.shape[1], raw(tables[name]).reshape(rows.shape)
            for first, end in _spans(slots, NEAR // width):
                rows[first:end] = source[first:end]
                self._gpu.upload(self.addresses[name] + first * width, rows[first:end])
        self._gpu.record(stage.copied)

    def write_all(self, tables: Mapping[str, Array]) -> None:
        """Writes whole tables, those that are given."""
        rows = next(iter(self._stages)).tables
        self.write(tables, {name: range(len(rows[name])) for name in rows if name in tables})


def raw(array: Array) -> Bytes:
    return array.reshape(-1).view(np.uint8)


def _spans(slots: Collection[int], gap: int) -> Iterator[tuple[int, int]]:
    """Ascending ranges [first, end) that cover `slots`, merged across gaps of up to `gap` slots."""
    ordered = sorted(slots)
    first = last = ordered[0]
    for slot in ordered[1:]:
        if slot - last - 1 > gap:
            yield first, last + 1
            first = slot
        last = slot
    yield first, last + 1


def _runs(pages: list[int]) -> Iterator[tuple[int, int, int]]:
    """(first page, its index in `pages`, count) of each run of consecutive pages."""
    start = 0
    for i in range(1, len(pages) + 1):
        if i == len(pages) or pages[i] != pages[i - 1] + 1:
            yield pages[start], start, i - start
            start = i


def _batches(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """The parts in order, in groups of at most STAGE bytes."""
    batch: list[Part] = []
    size = 0
    for part in parts:
        if size + len(part[1]) > STAGE:
            yield batch
            batch, size = [], 0
        batch.append(part)
        size += len(part[1])
    if batch:
        yield batch
