"""A Polygraphy runner over any executor: the only file that knows both.

It keeps the states from launch to launch, as a server does, chooses the bucket by the shapes of the
inputs, and returns the `defined_values`.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from polygraphy.backend.base import BaseRunner
from polygraphy.common import TensorMetadata

from spark_engine import interface
from spark_engine.check.engines.prompts import CheckLaunch, CheckSession
from spark_engine.check.verdicts.defined_values import defined_values, ends
from spark_engine.errors import InternalError
from spark_engine.interface import DECODE, PREFILL, PREFILL_TILE, verify_family
from spark_engine.runtime.engine.load import Loaded
from spark_engine.runtime.executors.memory import (
    BucketKey,
    EngineMemory,
    HostStates,
    Snapshot,
    States,
)
from spark_engine.tensors import DType, TensorSpec

Feed = Mapping[str, NDArray[Any]]
SESSION = "session"  # i32 [1]: a changed number starts a session with empty states
SHOW = "show_states"  # i32 [1]: 0 omits the states from the result


class SessionRunner(BaseRunner):  # type: ignore[misc]
    """Keeps the states between launches; a feed has steps, tables and two numbers.

    A new session starts with NaN in all states, so a launch that reads undefined values yields NaN.
    From states on a device, only the slots and pages of live sequences are copied, and only when
    they are shown; two runners must not share such an engine.
    """

    def __init__(self, name: str, engine: Loaded) -> None:
        super().__init__(name=name)
        self._engine = engine
        self._memory: EngineMemory | None = None
        self._session: int | None = None
        self._states: Mapping[str, NDArray[Any]] = {}
        self._paired: dict[int, NDArray[np.int32]] = {}

    def activate_impl(self) -> None:
        """Allocates the buffers of every bucket; no session is open."""
        engine = self._engine
        specs = {key: executor.specs for key, executor in engine.executors.items()}
        self._memory = EngineMemory(engine.states, engine.tables, specs, store=engine.device_states)
        apart = HostStates(engine.states) if engine.device_states is not None else None
        self._states = self._memory.states if apart is None else apart.arrays
        self._session = None

    def deactivate_impl(self) -> None:
        """Frees the buffers."""
        self._memory = None

    def get_input_metadata_impl(self) -> TensorMetadata:
        """Names, types and shapes; rows and tokens are unbound."""
        numbers = (TensorSpec(name, DType.I32, (1,)) for name in (SESSION, SHOW))
        # the step inputs of all families, with and without drafts, as in `CheckLaunch.feed`
        steps = interface.steps(PREFILL, drafts=1)
        metadata = TensorMetadata()
        for spec in (*numbers, *steps, *self._engine.tables):
            family = spec.name == "rope_offsets"  # its columns are those of a family
            shape = [d if isinstance(d, int) and not family else None for d in spec.shape]
            metadata.add(spec.name, spec.dtype.numpy, shape)
        return metadata

    def launch(self, feed: Feed) -> dict[str, NDArray[Any]]:
        """`infer` of a feed of `feeds`, without Polygraphy's checks of every input."""
        shown: dict[str, NDArray[Any]] = self.infer(feed, check_inputs=False)
        return shown

    def infer_impl(self, feed_dict: Feed) -> dict[str, NDArray[Any]]:
        """One launch of a session; returns the defined part of outputs and states. Raises
        InternalError if the engine has no bucket of these shapes."""
        key = self._key(feed_dict)
        if (session := int(feed_dict[SESSION][0])) != self._session:
            self._session, self._paired = session, {}
            self._poison(feed_dict["page_table"])
        buffers = self._run(key, feed_dict)
        if self._engine.limits.drafts:
            self._pair(buffers)
        outputs = [s.name for s in self._engine.executors[key].specs.outputs]
        states = self._engine.states if feed_dict[SHOW][0] else ()
        if states and self._engine.device_states is not None:
            self._fetch(self._engine.device_states, feed_dict)
        return dict(defined_values({**self._states, **buffers}, outputs, states, self._paired))

    def _pair(self, buffers: Feed) -> None:
        """Records the token of the draft head's keys and values at each position: the next token of
        its row, or else the sampled one."""
        counts, after = buffers["counts"], ends(buffers)
        sampled, by_row = buffers["next_tokens"], buffers["token_ids"].reshape(len(counts), -1)
        for row in np.flatnonzero(counts > 0).tolist():
            slot, start = (int(buffers[name][row]) for name in ("slots", "starts"))
            if start < 0:  # the states contain it
                continue
            empty = np.full(self._engine.limits.max_context + 1, -1, np.int32)
            mine = self._paired.setdefault(slot, empty)
            if "next_ids" in buffers:
                given = int(buffers["next_ids"][row])
                mine[start : after[row] - 1] = by_row[row, 1 : counts[row]]
                mine[after[row] - 1] = sampled[row] if given < 0 else given
            else:
                found = sampled.reshape(len(counts), -1)[row]
                mine[start : after[row]] = found[: after[row] - start]

    def _key(self, feed: Feed) -> BucketKey:
        rows, tokens = len(feed["slots"]), len(feed["token_ids"])
        family = {rows: DECODE, rows * PREFILL_TILE: PREFILL}.get(tokens, "")
        family = family or verify_family(tokens // rows - 1)
        if (family, rows) not in self._engine.executors:
            raise InternalError(f"{self.name} has no {family} bucket of {rows} rows")
        return family, rows

    def _run(self, key: BucketKey, feed: Feed) -> Mapping[str, NDArray[Any]]:
        if self._memory is None:
            raise InternalError(f"{self.name} was not activated")
        buffers = self._memory.buffers(*key, 0)
        for name, array in feed.items():
            if name in buffers:
                buffers[name][...] = array
        start = time.perf_counter()
        self._engine.executors[key].run(buffers)
        self.inference_time = time.perf_counter() - start
        return buffers

    def _poison(self, page_table: NDArray[Any]) -> None:
        """Writes NaN into the session's slots and pages, and into the scratch ones."""
        pages = np.append(np.unique(page_table[page_table >= 0]), self._engine.limits.pages)
        owners = np.flatnonzero((page_table >= 0).any(axis=1))
        slots = np.append(owners, self._engine.limits.max_seqs)
        for info in self._engine.states:
            state = self._states[info.spec.name]
            scratch = len(state) - 1  # after the snapshots, if a state has any
            if info.unit == "image":
                continue  # no text has rows of images
            state[pages if info.unit == "page" else [*slots, scratch]] = _poison_value(state.dtype)
        store = self._engine.device_states
        for slot in slots.tolist() if store is not None else ():
            assert store is not None
            mine = pages if slot == slots[0] else pages[:0]
            store.restore(self._snapshot(slot, mine), slot, mine.tolist())

    def _snapshot(self, slot: int, pages: NDArray[Any]) -> Snapshot:
        """The states as in the host's copy."""
        rows: dict[str, NDArray[Any]] = {}
        paged: dict[str, NDArray[Any]] = {}
        for info in self._engine.states:
            state, name = self._states[info.spec.name], info.spec.name
            if info.unit == "page":
                paged[name] = state[pages]
            elif info.unit != "image":
                rows[name] = state[slot, ...]
        return Snapshot(rows, paged)

    def _fetch(self, store: States, feed: Feed) -> None:
        """Copies the live sequences' slots and pages to the host's copy."""
        table = feed["page_table"]
        for slot in np.unique(feed["slots"][feed["counts"] > 0]).tolist():
            pages = table[slot][table[slot] >= 0]
            snapshot = store.save(slot, pages.tolist())
            for name, row in snapshot.rows.items():
                self._states[name][slot] = row
            for name, held in snapshot.pages.items():
                self._states[name][pages] = held


def feeds(sessions: Iterable[CheckSession]) -> Iterator[dict[str, NDArray[Any]]]:
    """The inputs of `SessionRunner`, launch by launch: a Polygraphy data loader.

    States are shown after the last launch of each family, since an error in a state persists.
    """
    for number, session in enumerate(sessions):
        families = [launch.family for launch in session.launches]
        last = {family: i for i, family in enumerate(families)}
        for i, launch in enumerate(session.launches):
            yield feed(session, launch, number, i in last.values())


def feed(
    session: CheckSession, launch: CheckLaunch, number: int, show: bool = False
) -> dict[str, NDArray[Any]]:
    """The inputs of one launch; another `number` starts a session with empty states."""
    marks = {name: np.array([x], np.int32) for name, x in ((SESSION, number), (SHOW, show))}
    return {**marks, **session.tables, **launch.feed()}


def _poison_value(dtype: np.dtype[Any]) -> Any:
    """Poison of a dtype: NaN, its e4m3 code, or a number larger than any count."""
    if dtype == np.uint8:
        return 0x7F
    return 1 << 24 if dtype.kind == "i" else np.nan
