"""All ranks of a CPU engine in this process, a thread for each, so that the check can read each.

Knows executors that take a communicator, and the states of ranks; compares nothing. Names of other
ranks' states have the rank: `layers.0.rank1.gdn_state`.
"""

import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import combinations

import numpy as np

from spark_engine.interface import STATE_OUT
from spark_engine.manifest import StateInfo
from spark_engine.runtime.engine.load import Loaded
from spark_engine.runtime.executors.by_buffers import ByBuffers
from spark_engine.runtime.executors.executor import Executor, SynchronousExecutor
from spark_engine.runtime.executors.memory import BucketKey, HostStates, Pairs, Snapshot, allocate
from spark_engine.runtime.ranks.communicator import LinkCommunicator
from spark_engine.tensors import Array

LIMIT_S = 600.0  # seconds: one thread may compute a step by reference while the others wait
Buffers = Mapping[str, Array]


class Rendezvous:
    """Communicators of ranks that are threads, and their work."""

    def __init__(self, ranks: int) -> None:
        peers: list[dict[int, socket.socket]] = [{} for _ in range(ranks)]
        for one, other in combinations(range(ranks), 2):
            peers[one][other], peers[other][one] = socket.socketpair()
        self.comms = tuple(LinkCommunicator(*row, LIMIT_S, here=True) for row in enumerate(peers))

    def run(self, works: Sequence[Callable[[], None]]) -> None:
        """Runs one task per rank, concurrently; raises the error of the first that failed, after
        which no rank exchanges any more."""
        errors: list[BaseException] = []

        def guarded(comm: LinkCommunicator, work: Callable[[], None]) -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)
                comm.abort(f"rank {comm.rank} has failed")

        with ThreadPoolExecutor(len(works)) as pool:
            for comm, work in zip(self.comms, works, strict=True):
                pool.submit(guarded, comm, work)
        if errors:
            raise errors[0]

    def close(self) -> None:
        for comm in self.comms:
            comm.close()


class RankStates:
    """The states of all ranks (`States`), those of layers by rank."""

    arrays: Mapping[str, Array] = {}  # the executors' own

    def __init__(self, infos: Iterable[StateInfo], ranks: int) -> None:
        self._infos = tuple(infos)
        self.of = tuple(HostStates(self._infos) for _ in range(ranks))
        first = self.of[0]
        self.slot_bytes, self.page_bytes = first.slot_bytes, first.page_bytes
        self.snapshot_rows, self.snapshot_bytes = first.snapshot_rows, first.snapshot_bytes

    @property
    def shown(self) -> tuple[StateInfo, ...]:
        """The states of a snapshot, by their names in it."""
        return self._infos + tuple(
            replace(info, spec=replace(info.spec, name=name_of(info.spec.name, rank)))
            for rank in range(1, len(self.of))
            for info in self._infos
            if name_of(info.spec.name, rank) != info.spec.name
        )

    def copy_rows(self, pairs: Pairs) -> None:
        """Copies rows of the states by sequence."""
        for states in self.of:
            states.copy_rows(pairs)

    def copy_pages(self, pairs: Pairs) -> None:
        for states in self.of:
            states.copy_pages(pairs)

    def set_counts(self, slot: int, ids: Iterable[int], generated: Iterable[int] = ()) -> None:
        """Writes the slot's `token_counts`."""
        counts = list(ids), list(generated)
        for states in self.of:
            states.set_counts(slot, *counts)

    def save(self, slot: int, pages: Iterable[int]) -> Snapshot:
        """Copies one sequence's slot rows and pages; those of layers for all ranks."""
        rows: dict[str, Array] = {}
        paged: dict[str, Array] = {}
        where = list(pages)
        for rank, states in reversed([*enumerate(self.of)]):  # rank 0's, where ranks are equal
            found = states.save(slot, where)
            rows |= {name_of(name, rank): array for name, array in found.rows.items()}
            paged |= {name_of(name, rank): array for name, array in found.pages.items()}
        return Snapshot(rows, paged)

    def restore(self, snapshot: Snapshot, slot: int, pages: Iterable[int]) -> None:
        """Writes a snapshot, each rank's part into that rank."""
        where = list(pages)
        for rank, states in enumerate(self.of):
            mine = [(info.spec.name, name_of(info.spec.name, rank)) for info in self._infos]
            rows = {name: snapshot.rows[k] for name, k in mine if k in snapshot.rows}
            paged = {name: snapshot.pages[k] for name, k in mine if k in snapshot.pages}
            states.restore(Snapshot(rows, paged), slot, where)


class RanksExecutor(SynchronousExecutor):
    """One bucket of all ranks (runtime/executors/executor.py).

    Its outputs are rank 0's; logits are concatenated to all `vocab` ids if each rank has some.
    """

    def __init__(
        self, parts: Sequence[Executor], states: RankStates, rendezvous: Rendezvous, vocab: int
    ) -> None:
        self.parts, self._states, self._rendezvous = tuple(parts), states, rendezvous
        specs, ranks = self.parts[0].specs, len(self.parts)
        cut = {s.name for s in specs.outputs if "logits" in s.name and s.dims[-1] * ranks == vocab}
        self._cut = cut
        whole = (replace(s, shape=(*s.shape[:-1], vocab)) if s.name in cut else s
                 for s in specs.outputs)  # fmt: skip
        self.specs = replace(specs, outputs=tuple(whole))  # rank 0's, with all ranks' logits
        self._own = [
            {s.name: allocate(s) for s in specs.outputs if rank or s.name in cut}
            for rank in range(ranks)
        ]
        self._known = ByBuffers[list[Buffers]]()

    def run(self, buffers: Buffers) -> None:
        """One step of all ranks over their states. Raises the error of a rank."""
        works = zip(self.parts, self.of(buffers), strict=True)
        self._rendezvous.run([partial(part.run, own) for part, own in works])
        for name in self._cut:
            buffers[name][...] = np.concatenate([own[name] for own in self._own], axis=-1)

    def of(self, buffers: Buffers) -> list[Buffers]:
        """The buffers by rank; cached for the same buffers."""

        def make() -> list[Buffers]:
            made: list[Buffers] = []
            for states, outputs in zip(self._states.of, self._own, strict=True):
                outs = {name + STATE_OUT: array for name, array in states.arrays.items()}
                made.append({**buffers, **states.arrays, **outs, **outputs})
            return made

        return self._known.find(buffers, make)

    def close(self) -> None:
        for part in self.parts:
            part.close()
        self._rendezvous.close()


def together(
    loaded: Loaded, rendezvous: Rendezvous, by_rank: Sequence[Mapping[BucketKey, Executor]]
) -> Loaded:
    """The engine with the executors of all ranks; its snapshots have the states of all."""
    assert loaded.folder is not None
    states = RankStates(loaded.folder.manifest.states, len(by_rank))
    executors = {
        key: RanksExecutor([one[key] for one in by_rank], states, rendezvous, loaded.limits.vocab)
        for key in by_rank[0]
    }
    return replace(loaded, executors=executors, states=states.shown, device_states=states)


def name_of(name: str, rank: int) -> str:
    """The name of a rank's state of a layer; other states are equal on all ranks."""
    layer, dot, last = name.rpartition(".")
    return f"{layer}.rank{rank}.{last}" if rank and dot else name


def threads_of(ranks: int) -> int:
    """A slice for each rank, so that no rank waits for another's."""
    return max(1, (os.cpu_count() or 1) // ranks)
