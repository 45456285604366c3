"""Rank 0's executors, states and tables, wrapped so that every call is replicated to the others.

In: the calls of the engine's loop. Out: the same calls on rank 0's own objects, and one packet of
messages (messages.py) to all other ranks with each launch. Nothing here waits for another rank, and
ranks answer only when they fail. Knows neither processes nor what a plan is for.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from spark_engine.errors import ExecutorError, SparkError
from spark_engine.interface import STATE_OUT
from spark_engine.runtime.executors.executor import Executor, Specs, Wait
from spark_engine.runtime.executors.memory import (
    BucketKey,
    Changed,
    Pairs,
    Snapshot,
    States,
    TableSink,
)
from spark_engine.runtime.ranks.messages import (
    CopyPages,
    CopyRows,
    Drop,
    Launch,
    LaunchRest,
    Order,
    Restore,
    Save,
    SetCounts,
    Table,
    Tables,
    encode,
)
from spark_engine.tensors import Array

MOST_MERGED = 4  # sets of buffers remembered by an executor; an engine has one or two


class FollowerLink(Protocol):
    """Sends packets to the other ranks, and knows which of them failed (`Group`)."""

    def send(self, data: bytes) -> None:
        """To every other rank. Raises ExecutorError naming one that takes nothing."""
        ...

    def check(self) -> None:
        """Raises what a rank has fallen of, if one has."""
        ...

    def explain(self, error: ExecutorError) -> SparkError:
        """The error, or what a rank says that it fell of, which is what led to it."""
        ...

    def waiting(self, waits: bool) -> None:
        """Rank 0 begins to wait for a device, or has ended to."""
        ...


class Orders:
    """Commands that were not sent to the other ranks yet, in order."""

    def __init__(self, told: FollowerLink) -> None:
        self._told = told
        self._orders: list[Order] = []
        self._dropped: deque[int] = deque()  # filled by finalizers, at any time
        self._numbers = 0

    def add(self, order: Order) -> None:
        """Tells it with the next launch."""
        while self._dropped:
            self._orders.append(Drop(self._dropped.popleft()))
        self._orders.append(order)

    def send(self) -> None:
        """Tells all. Raises ExecutorError where a rank has fallen."""
        self._told.check()
        orders, self._orders = self._orders, []
        with self.explained():
            self._told.send(encode(orders))

    @contextmanager
    def explained(self) -> Iterator[None]:
        """A rank's own last words go before what was seen of its end."""
        try:
            yield
        except ExecutorError as error:
            raise self._told.explain(error) from error

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Rank 0 waits for a device meanwhile; a rank's own last words, as above."""
        self._told.waiting(True)
        try:
            with self.explained():
                yield
                self._told.check()  # what a device gave after a rank had fallen is nobody's
        finally:
            self._told.waiting(False)

    def number(self, snapshot: Callable[[int], LeadSnapshot]) -> LeadSnapshot:
        """A snapshot under a number of its own; when it is forgotten, all ranks forget it."""
        self._numbers += 1
        made = snapshot(self._numbers)
        weakref.finalize(made, self._dropped.append, self._numbers)
        return made


class LeadExecutor:
    """One bucket of rank 0. `tables` are told apart; `states` stand in for those that the buffers
    do not hold, where the inner executor wants them among its buffers."""

    def __init__(
        self,
        inner: Executor,
        key: BucketKey,
        orders: Orders,
        tables: Collection[str],
        states: Mapping[str, Array],
    ) -> None:
        self._inner, self._key, self._orders = inner, key, orders
        self._steps = tuple(s for s in inner.specs.inputs if s.name not in tables)
        self._tables = tuple(s.name for s in inner.specs.inputs if s.name in tables)
        self._buffers = WithStates(inner.specs, states)

    @property
    def inner(self) -> Executor:
        """Rank 0's own, whose launches no other rank follows."""
        return self._inner

    @property
    def specs(self) -> Specs:
        """The inner one's."""
        return self._inner.specs

    def run(self, buffers: Mapping[str, Array]) -> None:
        """One step to its end, over the tables in `buffers` and states of every rank's own."""
        told = [table_rows(name, buffers[name], range(len(buffers[name]))) for name in self._tables]
        self._orders.add(Tables(told))
        self._tell(buffers, part=False)
        with self._orders.explained():
            self._inner.run(self._buffers.over(buffers))

    def launch(self, buffers: Mapping[str, Array]) -> Wait:
        """Tells the others and launches."""
        self._tell(buffers, part=False)
        with self._orders.explained():
            return self._watched(self._inner.launch(self._buffers.over(buffers)))

    def launch_to_sample(self, buffers: Mapping[str, Array]) -> Callable[[], Wait]:
        """Tells the others and launches the part before sampling; the rest likewise."""
        self._tell(buffers, part=True)
        with self._orders.explained():
            rest = self._inner.launch_to_sample(self._buffers.over(buffers))

        def go_on() -> Wait:
            self._orders.add(LaunchRest())
            self._orders.send()
            with self._orders.explained():
                return self._watched(rest())

        return go_on

    def close(self) -> None:
        """Closes the inner one."""
        self._inner.close()

    def _tell(self, buffers: Mapping[str, Array], part: bool) -> None:
        inputs = b"".join(buffers[spec.name].tobytes() for spec in self._steps)
        self._orders.add(Launch(*self._key, inputs, part))
        self._orders.send()

    def _watched(self, wait: Wait) -> Wait:
        def watched() -> None:
            with self._orders.waiting():
                wait()

        return watched


class WithStates:
    """Buffers with the states that they do not hold; the same mapping for the same buffers, by
    which executors remember what they have bound."""

    def __init__(self, specs: Specs, states: Mapping[str, Array]) -> None:
        mine = {s.name: states[s.name] for s in specs.states if s.name in states}
        self._states = {**mine, **{name + STATE_OUT: state for name, state in mine.items()}}
        self._known: list[tuple[Mapping[str, Array], Mapping[str, Array]]] = []

    def over(self, buffers: Mapping[str, Array]) -> Mapping[str, Array]:
        """`buffers` and the states."""
        if not self._states:
            return buffers
        for known, merged in self._known:
            if known is buffers:
                return merged
        merged = {**self._states, **buffers}
        self._known = [*self._known[1 - MOST_MERGED :], (buffers, merged)]
        return merged


@dataclass(frozen=True)
class LeadSnapshot(Snapshot):
    """Rank 0's part; the others have theirs under the number."""

    number: int


class LeadStates:
    """The states of rank 0, and those of the others like them."""

    def __init__(self, inner: States, orders: Orders) -> None:
        self._inner, self._orders = inner, orders
        self.arrays = inner.arrays
        self.slot_bytes, self.page_bytes = inner.slot_bytes, inner.page_bytes
        self.snapshot_rows = inner.snapshot_rows
        self.snapshot_bytes = inner.snapshot_bytes

    @property
    def inner(self) -> States:
        """Rank 0's own."""
        return self._inner

    def copy_rows(self, pairs: Pairs) -> None:
        """Copies rows of the states by sequence."""
        self._orders.add(CopyRows([*pairs]))
        self._inner.copy_rows(pairs)

    def copy_pages(self, pairs: Pairs) -> None:
        """Copies pages."""
        self._orders.add(CopyPages([*pairs]))
        self._inner.copy_pages(pairs)

    def set_counts(self, slot: int, ids: Iterable[int], generated: Iterable[int] = ()) -> None:
        """Writes the slot's `token_counts`."""
        told = SetCounts(slot, list(ids), list(generated))
        self._orders.add(told)
        self._inner.set_counts(slot, told.ids, told.generated)

    def save(self, slot: int, pages: Iterable[int]) -> Snapshot:
        """Copies one sequence's slot rows and pages, every rank its own."""
        where = list(pages)
        with self._orders.waiting():
            own = self._inner.save(slot, where)
        made = self._orders.number(lambda number: LeadSnapshot(own.rows, own.pages, number))
        self._orders.add(Save(made.number, slot, where))
        return made

    def restore(self, snapshot: Snapshot, slot: int, pages: Iterable[int]) -> None:
        """Writes a snapshot of `save` into a slot and pages, every rank its own."""
        if not isinstance(snapshot, LeadSnapshot):
            raise ExecutorError("a snapshot that no rank but this one has is to be restored")
        where = list(pages)
        self._orders.add(Restore(snapshot.number, slot, where))
        with self._orders.waiting():
            self._inner.restore(snapshot, slot, where)


class LeadTables:
    """The tables of every rank; `inner` is rank 0's device, if it has one."""

    def __init__(self, inner: TableSink | None, orders: Orders) -> None:
        self._inner, self._orders = inner, orders

    def write(self, tables: Mapping[str, Array], changed: Changed) -> None:
        """Brings these rows to every rank, for every launch from here on."""
        told = [table_rows(name, tables[name], slots) for name, slots in changed.items()]
        self._orders.add(Tables(told))
        if self._inner is not None:
            self._inner.write(tables, changed)


def table_rows(name: str, table: Array, slots: Collection[int]) -> Table:
    """These rows as they are now."""
    where = sorted(slots)
    return Table(name, where, table[where].tobytes())
