"""The loop of ranks 1 and up: replays rank 0's commands on their own executors, states and tables.

Input: decoded packets (messages.py), in order. Output: launches over this rank's shard of the
weights. Knows no process, scheduler or request. It waits for a step only before it reuses the
step's buffers, and rank 0 has waited for that step before.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from spark_engine.errors import ExecutorError
from spark_engine.manifest import StateInfo
from spark_engine.runtime.executors.executor import Executor, Wait
from spark_engine.runtime.executors.memory import (
    BucketKey,
    EngineMemory,
    Snapshot,
    States,
    TableSink,
)
from spark_engine.runtime.ranks import messages
from spark_engine.tensors import Array, TensorSpec

SETS = 2  # of buffers, used in turn: this many steps may be in flight


@dataclass
class _BufferSets:
    """A family's buffers: the index of the next set, and the wait of the last launch
    over each set."""

    next: int = 0
    pending: list[Wait | None] = field(default_factory=lambda: [None] * SETS)


class Follower:
    """One rank's replay. `store` and `sink` as in `Loaded`."""

    def __init__(
        self,
        executors: Mapping[BucketKey, Executor],
        states: Iterable[StateInfo],
        tables: Iterable[TensorSpec],
        store: States | None = None,
        sink: TableSink | None = None,
    ) -> None:
        self._executors = executors
        self._tables = tuple(tables)
        specs = {key: executor.specs for key, executor in executors.items()}
        self.memory = EngineMemory(states, self._tables, specs, SETS, store, sink)
        self.snapshots: dict[int, Snapshot] = {}
        self._inputs: list[bytes] = []  # of the next launch
        self._turns = {family: _BufferSets() for family, _ in executors}
        self._rest: tuple[_BufferSets, int, Callable[[], Wait]] | None = None
        self._steps = {
            key: tuple(s for s in one.inputs if s.name not in self.memory.tables)
            for key, one in specs.items()
        }

    def follow(self, orders: Iterable[messages.Order]) -> bool:
        """Executes the packet's commands; False after `Leave`. Raises ExecutorError, or the
        executors' errors."""
        for order in orders:
            if isinstance(order, messages.Leave):
                return False
            self._do(order)
        return True

    def _do(self, order: messages.Order) -> None:
        store = self.memory.store
        match order:
            case messages.InputPiece(data):
                self._inputs.append(data)
            case messages.LaunchBucket():
                self._launch(order)
            case messages.LaunchRest():
                self._launch_rest()
            case messages.Tables():
                self._write(order)
            case messages.CopyRows(pairs):
                store.copy_rows(pairs)
            case messages.CopyPages(pairs):
                store.copy_pages(pairs)
            case messages.SetCounts(slot, ids, generated):
                store.set_counts(slot, ids, generated)
            case messages.Save(number, slot, pages):
                self.snapshots[number] = store.save(slot, pages)
            case messages.Restore(number, slot, pages):
                store.restore(self._saved(number), slot, pages)
            case messages.Drop(number):
                self.snapshots.pop(number, None)

    def _launch(self, order: messages.LaunchBucket) -> None:
        key = order.family, order.rows
        if key not in self._executors:
            raise ExecutorError(f"rank 0 launches {key}, which this rank does not have")
        turns = self._turns[order.family]
        at, turns.next = turns.next, (turns.next + 1) % SETS
        if (pending := turns.pending[at]) is not None:
            turns.pending[at] = None
            pending()
        buffers = self.memory.buffers(*key, at)
        inputs, self._inputs = b"".join((*self._inputs, order.inputs)), []
        self._fill(key, buffers, inputs, order.live)
        self.memory.flush()
        executor = self._executors[key]
        if order.part:
            self._rest = turns, at, executor.launch_to_sample(buffers)
        else:
            turns.pending[at] = executor.launch(buffers)

    def _launch_rest(self) -> None:
        if self._rest is None:
            raise ExecutorError("rank 0 continues a launch that this rank has not started")
        turns, at, rest = self._rest
        self._rest = None
        self.memory.flush()
        turns.pending[at] = rest()

    def _fill(
        self, key: BucketKey, buffers: Mapping[str, Array], data: bytes, live: int | None
    ) -> None:
        at = 0
        for spec in self._steps[key]:
            own = buffers[spec.name][:live]
            own[...] = np.frombuffer(data, spec.dtype.numpy, own.size, at).reshape(own.shape)
            at += own.nbytes
        if at != len(data):
            raise ExecutorError(f"rank 0 sent {len(data)} bytes for {key}, this rank expects {at}")

    def _write(self, order: messages.Tables) -> None:
        for row in order.tables:
            table = self.memory.tables[row.name]
            given = np.frombuffer(row.data, table.dtype).reshape(len(row.slots), *table.shape[1:])
            table[row.slots] = given
            for slot in row.slots:
                self.memory.mark(slot, (row.name,))

    def _saved(self, number: int) -> Snapshot:
        if number not in self.snapshots:
            raise ExecutorError(f"rank 0 restores snapshot {number}, which this rank does not have")
        return self.snapshots[number]
