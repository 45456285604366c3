"""Rank 0's executors, states and tables, wrapped so that the other ranks replicate every call.

Input: the calls of the engine's loop. Output: the same calls on rank 0's own objects, and one
packet of messages (messages.py) to the other ranks with each launch, before an image's some more of
at most PIECE bytes. No call waits for another rank; a rank answers only if it fails. Knows no plan.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from spark_engine.errors import ExecutorError
from spark_engine.interface import STATE_OUT
from spark_engine.runtime.executors import memory
from spark_engine.runtime.executors.by_buffers import ByBuffers
from spark_engine.runtime.executors.executor import Executor, Wait
from spark_engine.runtime.ranks import messages
from spark_engine.runtime.ranks.group import RankGroup
from spark_engine.tensors import Array
from spark_engine.vision import VISION

PIECE = 4 << 20  # bytes of inputs in a packet: the ring of a host holds some


class Orders:
    """Commands for the other ranks that are not sent yet, in order."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._orders: list[messages.Order] = []
        self._dropped: deque[int] = deque()  # finalizers append to it at any time
        self._numbers = 0

    def add(self, order: messages.Order) -> None:
        while self._dropped:
            self._orders.append(messages.Drop(self._dropped.popleft()))
        self._orders.append(order)

    def send(self) -> None:
        """Sends all commands. Raises ExecutorError if a rank has failed."""
        self._group.check()
        orders, self._orders = self._orders, []
        with self.explained():
            self._group.send(messages.encode(orders))

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Replaces an ExecutorError by the failed rank's own error, if it sends one."""
        try:
            yield
        except ExecutorError as error:
            raise self._group.explain(error) from error

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Encloses rank 0's wait for a device; replaces errors as `explained` does."""
        self._group.waiting(True)
        try:
            with self.explained():
                yield
                self._group.check()  # results after a rank's failure are invalid
        finally:
            self._group.waiting(False)

    def number(self, snapshot: Callable[[int], LeadSnapshot]) -> LeadSnapshot:
        """A snapshot with a new number; when rank 0 frees it, all ranks free it."""
        self._numbers += 1
        made = snapshot(self._numbers)
        weakref.finalize(made, self._dropped.append, self._numbers)
        return made


class LeadExecutor:
    """One bucket of rank 0. `tables` are sent by `LeadTables`, not with launches. `states`: host
    states, for an inner executor that reads them from its buffers."""

    def __init__(
        self,
        inner: Executor,
        key: memory.BucketKey,
        orders: Orders,
        tables: Collection[str],
        states: Mapping[str, Array],
    ) -> None:
        self.specs, self.inner = inner.specs, inner  # the other ranks replicate no launch of it
        self._key, self._orders = key, orders
        self._steps = tuple(s for s in inner.specs.inputs if s.name not in tables)
        self._tables = tuple(s.name for s in inner.specs.inputs if s.name in tables)
        mine = {s.name: states[s.name] for s in inner.specs.states if s.name in states}
        self._states = {**mine, **{name + STATE_OUT: state for name, state in mine.items()}}
        self._whole = ByBuffers[Mapping[str, Array]]()

    def run(self, buffers: Mapping[str, Array]) -> None:
        """Runs one step, over the tables in `buffers` and every rank's own states."""
        rows = [table_rows(name, buffers[name], range(len(buffers[name]))) for name in self._tables]
        self._orders.add(messages.Tables(rows))
        self._tell(buffers, part=False)
        with self._orders.explained():
            self.inner.run(self._over(buffers))

    def launch(self, buffers: Mapping[str, Array]) -> Wait:
        self._tell(buffers, part=False)
        with self._orders.explained():
            return self._watched(self.inner.launch(self._over(buffers)))

    def launch_to_sample(self, buffers: Mapping[str, Array]) -> Callable[[], Wait]:
        """Sends and launches the part before sampling; the returned function does the same for the
        rest."""
        self._tell(buffers, part=True)
        with self._orders.explained():
            rest = self.inner.launch_to_sample(self._over(buffers))

        def launch_rest() -> Wait:
            self._orders.add(messages.LaunchRest())
            self._orders.send()
            with self._orders.explained():
                return self._watched(rest())

        return launch_rest

    def close(self) -> None:
        self.inner.close()

    def _over(self, buffers: Mapping[str, Array]) -> Mapping[str, Array]:
        """`buffers` combined with the states that they do not hold."""
        if not self._states:
            return buffers
        return self._whole.find(buffers, lambda: {**self._states, **buffers})

    def _tell(self, buffers: Mapping[str, Array], part: bool) -> None:
        live = int(buffers["live"][0]) if self._key[0] == VISION else None
        inputs = b"".join(buffers[spec.name][:live].tobytes() for spec in self._steps)
        last = max(0, len(inputs) - 1) // PIECE * PIECE
        for at in range(0, last, PIECE):
            self._orders.add(messages.InputPiece(inputs[at : at + PIECE]))
            self._orders.send()
        self._orders.add(messages.LaunchBucket(*self._key, inputs[last:], part, live))
        self._orders.send()

    def _watched(self, wait: Wait) -> Wait:
        def watched() -> None:
            with self._orders.waiting():
                wait()

        return watched


@dataclass(frozen=True)
class LeadSnapshot(memory.Snapshot):
    """Rank 0's part of a snapshot; the other ranks keep theirs under the number."""

    number: int


class LeadStates:
    """The states of rank 0; the other ranks replicate every change."""

    def __init__(self, inner: memory.States, orders: Orders) -> None:
        self.inner, self._orders = inner, orders  # rank 0's own states
        self.arrays = inner.arrays
        self.slot_bytes, self.page_bytes = inner.slot_bytes, inner.page_bytes
        self.snapshot_rows = inner.snapshot_rows
        self.snapshot_bytes = inner.snapshot_bytes

    def copy_rows(self, pairs: memory.Pairs) -> None:
        self._orders.add(messages.CopyRows([*pairs]))
        self.inner.copy_rows(pairs)

    def copy_pages(self, pairs: memory.Pairs) -> None:
        self._orders.add(messages.CopyPages([*pairs]))
        self.inner.copy_pages(pairs)

    def set_counts(self, slot: int, ids: Iterable[int], generated: Iterable[int] = ()) -> None:
        counts = messages.SetCounts(slot, list(ids), list(generated))
        self._orders.add(counts)
        self.inner.set_counts(slot, counts.ids, counts.generated)

    def save(self, slot: int, pages: Iterable[int]) -> memory.Snapshot:
        where = list(pages)
        with self._orders.waiting():
            own = self.inner.save(slot, where)
        made = self._orders.number(lambda number: LeadSnapshot(own.rows, own.pages, number))
        self._orders.add(messages.Save(made.number, slot, where))
        return made

    def restore(self, snapshot: memory.Snapshot, slot: int, pages: Iterable[int]) -> None:
        """Writes a snapshot of `save` into a slot and pages, on every rank."""
        if not isinstance(snapshot, LeadSnapshot):
            raise ExecutorError("cannot restore a snapshot that only rank 0 has")
        where = list(pages)
        self._orders.add(messages.Restore(snapshot.number, slot, where))
        with self._orders.waiting():
            self.inner.restore(snapshot, slot, where)


class LeadTables:
    """The tables of every rank; `inner` is rank 0's device, if it has one."""

    def __init__(self, inner: memory.TableSink | None, orders: Orders) -> None:
        self._inner, self._orders = inner, orders

    def write(self, tables: Mapping[str, Array], changed: memory.Changed) -> None:
        rows = [table_rows(name, tables[name], slots) for name, slots in changed.items()]
        self._orders.add(messages.Tables(rows))
        if self._inner is not None:
            self._inner.write(tables, changed)


def table_rows(name: str, table: Array, slots: Collection[int]) -> messages.Table:
    where = sorted(slots)
    return messages.Table(name, where, table[where].tobytes())
