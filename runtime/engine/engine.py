"""The engine as its caller sees it: submit, cancel, step, and what it is doing.

Knows no text, no HTTP and no op. One thread owns an engine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

from spark_engine.errors import InternalError, OptionError, RequestError
from spark_engine.interface import (
    BLOCK_DRAFTER,
    BLOCKS,
    COPIED,
    DECODE,
    DRAFT_HEAD,
    MTP,
    PREFILL,
    PREFILL_TILE,
    drafts_by_block,
    verify_family,
)
from spark_engine.progress import Progress
from spark_engine.runtime.engine.disk.cache_folder import CacheFolder
from spark_engine.runtime.engine.disk.disk_cache import DISK_BYTES, DiskCache
from spark_engine.runtime.engine.draft_counts import DraftCounts
from spark_engine.runtime.engine.load import GIB, Loaded, load
from spark_engine.runtime.engine.masks import Masks
from spark_engine.runtime.engine.options import EngineOptions as EngineOptions
from spark_engine.runtime.engine.request import Event, FinishReason, Request, capacity
from spark_engine.runtime.engine.scheduler import Scheduler
from spark_engine.runtime.engine.sequence import Sequence
from spark_engine.runtime.engine.sizes import EngineSizes
from spark_engine.runtime.engine.state import describe
from spark_engine.runtime.engine.step import Loop
from spark_engine.runtime.engine.token_constraint_state import ConstraintState
from spark_engine.runtime.engine.trace import NoTrace
from spark_engine.runtime.executors.executor import Executor
from spark_engine.runtime.executors.memory import BucketKey, EngineMemory, PrefixStore
from spark_engine.runtime.executors.timed import TimedExecutor
from spark_engine.runtime.ranks.rendezvous import split_hosts

CHECK_S = 0.25  # seconds between an idle engine's checks of its other ranks


class Engine:
    """Runs requests over one engine, many at a time.

    Every submitted request ends with exactly one event that has a finish reason.
    """

    def __init__(
        self, loaded: Loaded, options: EngineOptions | None = None, trace: NoTrace | None = None
    ) -> None:
        """`trace` records the parts of each step, and when launches ran."""
        self.options = options or EngineOptions()
        self._trace = trace or NoTrace()
        given = self.options.depth
        ahead = loaded.device_states is not None and not loaded.synchronous
        self.depth = int(ahead) if given is None else given
        self.loaded = loaded
        specs = {key: executor.specs for key, executor in loaded.executors.items()}
        own = (loaded.device_states, loaded.table_writer)
        self.memory = EngineMemory(loaded.states, loaded.tables, specs, self.depth + 1, *own)
        self.scheduler = Scheduler(self._sizes(), self.options.policy, loaded.costs)
        self.drafts = len(self.scheduler.sizes.verify)  # most of a round
        self._masks = Masks(self.memory, self.options.grammars)
        parts = self.scheduler, self.memory, self._executors(), self._masks
        images = loaded.vision, loaded.limits.vocab
        self._loop = Loop(*parts, self.depth, self._trace, *images)
        self._disk = self._open_disk()
        self._buckets = [(key, f"{key[0]}_{key[1]}") for key in sorted(loaded.executors)]
        self._live: dict[int, Sequence] = {}
        self._events: list[Event] = []  # of cancelled requests
        self._next_id = 0
        self._random = random.Random(self.options.seed)
        self._last_step = time.monotonic()

    @classmethod
    def open(
        cls,
        folder: Path,
        options: EngineOptions | None = None,
        shown: Progress | None = None,
        trace: NoTrace | None = None,
    ) -> Engine:
        """Opens an engine folder and shows its progress.

        Raises EngineError or CapacityError (see `load`).
        """
        options = options or EngineOptions()
        loaded = load(
            folder,
            options.swap_bytes,
            options.threads,
            shown=shown,
            cache_bytes=options.cache_bytes,
            graphs=options.graphs,
            masks=options.grammars is not None,
            hosts=split_hosts(options.hosts),
            host_bytes=options.host_bytes,
        )
        engine = cls(loaded, options, trace)
        if engine._disk is not None:
            files = engine._disk.folder
            used = f"{files.used / GIB:.2f} of {files.most / GIB:.2f} GiB in {files.path}"
            (shown or Progress(None)).say(f"prefix cache on disk: {used}")
        return engine

    @property
    def idle(self) -> bool:
        copying = self._disk is not None and self._disk.busy
        return not (self._live or self._events or self._loop.in_flight or copying)

    def submit(self, request: Request) -> int:
        """Checks and queues a request, and returns its id, which grows with every call.

        Raises RequestError when this engine can never run it, CapacityError when the queue is full.
        """
        request.check(self.loaded.limits, self.loaded.eos, self.loaded.vision)
        request_id = self._next_id
        self.add(request_id, request)
        return request_id

    def add(self, request_id: int, request: Request) -> None:
        """Queues a request that `Request.check` has passed, under an id above all before it.

        Raises CapacityError when the queue is full, RequestError when the request has a grammar and
        the engine takes none.
        """
        constraint = request.constraint
        if constraint is not None and constraint.grammar and self.options.grammars is None:
            raise RequestError(
                "the request has a grammar, and this engine was opened without any: give "
                "EngineOptions.grammars"
            )
        if request_id < self._next_id:
            raise InternalError(f"request {request_id} comes after request {self._next_id - 1}")
        params, longest = request.params, capacity(self.loaded.limits)
        limit = min(longest, len(request.prompt) + (params.max_tokens or longest))
        seed = self._random.getrandbits(64) if params.seed is None else params.seed
        drafts = self.drafts if params.drafts is None else min(params.drafts, self.drafts)
        stops = params.stop_ids(self.loaded.eos)
        state = None
        if constraint is not None:
            state = ConstraintState(constraint, self.loaded.limits.vocab, stops, drafts)
        counted = self.scheduler.sizes.sources if params.draft_counts and self.drafts else ()
        own = {source: DraftCounts.zeros(self.drafts) for source in counted} or None
        seq = Sequence(request_id, request, limit, stops, seed, drafts, state, by_source=own)
        self.scheduler.check_queue(0 if self._disk is None else len(self._disk.waiting))
        if self._disk is None or not self._disk.hold(seq):
            self._queue(seq)
        self._next_id = request_id + 1
        self._live[request_id] = seq

    def _queue(self, seq: Sequence) -> None:
        self.scheduler.add(seq)
        self._masks.begin(seq)

    def cancel(self, request_id: int, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        """Ends a request; its last event comes with the next `step`.

        The frontend gives the reason STOP when it saw a stop string. False, and nothing is
        done, when the request has ended already or never was.
        """
        seq = self._live.pop(request_id, None)
        if seq is None:
            return False
        if self._disk is not None and self._disk.drop(request_id):
            seq.end(reason)
        else:
            self.scheduler.finish(seq, reason)
            self._loop.keep_ended()
        self._events.append(seq.last_event(reason))
        return True

    def step(self) -> list[Event]:
        """Does one step and returns its events, in order for each request."""
        events, self._events = self._events, []
        if self._disk is not None and self._disk.busy:
            running = bool(self.scheduler.running or self.scheduler.waiting)
            for seq in self._disk.advance(running):
                self._queue(seq)
        if self._live or self._loop.in_flight:
            events += self._loop.step()
        for event in events:
            if event.finish:
                self._live.pop(event.request_id, None)
        self._last_step = time.monotonic()
        self._trace.end(self.idle)
        return events

    @property
    def started(self) -> list[tuple[int, float]]:
        """Requests that got a slot in the last step, and when (`time.monotonic`)."""
        return self._loop.started

    def stats(self) -> dict[str, object]:
        """Figures for metrics and a watchdog; plain numbers by name.

        `last_step_age` is seconds since the last step ended; with live requests it must stay
        small. `buckets` counts launches by bucket, "decode_8". The others count since the start.
        """
        counts = self._loop.counts
        counted: dict[str, object] = {f.name: getattr(counts, f.name) for f in fields(counts)}
        counted["rounds_by_k"] = dict(counts.rounds_by_k)
        counted["buckets"] = {name: counts.buckets[key] for key, name in self._buckets}
        age = time.monotonic() - self._last_step
        found = self.scheduler.stats()
        if self._disk is not None:
            found |= self._disk.stats()
            found["waiting"] += len(self._disk.waiting)
        return {**found, "last_step_age": age, **counted}

    def check(self) -> float | None:
        """Raises the error that ended another rank; else seconds until the next check, None where
        there are no other ranks. A step checks by itself."""
        group = self.loaded.group
        if group is None:
            return None
        group.check()
        return CHECK_S

    def state(self) -> dict[str, object]:
        """The engine's state for a dump: plain values without a token. Another thread may call it
        while `step` hangs; it may fail while `step` runs."""
        loop, seqs = self._loop, list(self._live.values())
        return describe(self.scheduler, loop.plan, loop.launched, seqs) | {"stats": self.stats()}

    def clear_cache(self) -> None:
        """Empties the prefix cache; pages in use are free when they no longer are."""
        self.scheduler.clear_cache()

    def save_memory(self, short: bool) -> None:
        """While the host's memory is `short` no sequence is swapped out; those that are, prefill
        again, and the prefix cache is emptied. What executors have allocated stays allocated."""
        self.scheduler.save_memory(short)

    def close(self) -> None:
        """Closes every executor. May be called twice."""
        if self._disk is not None:
            self._disk.close()
        self._masks.close()
        self.loaded.close()

    @property
    def disk_bytes(self) -> int:
        """That the prefix cache's folder may hold; 0 without one."""
        return 0 if self._disk is None else self._disk.folder.most

    def settle(self) -> None:
        """Waits, for a few seconds at most, until what requests left is on the disk, if it is to be
        there. For another thread than that which steps."""
        if self._disk is not None:
            self._disk.settle()

    def _open_disk(self) -> DiskCache | None:
        """Raises OptionError for a folder that cannot be used, and where it would do nothing."""
        path, most = self.options.cache_dir, self.options.cache_dir_bytes
        if path is None:
            return None
        loaded, store, prefix = self.loaded, self.memory.store, self.scheduler.prefix
        if not isinstance(store, PrefixStore):
            words = "an engine of several ranks keeps no prefix on a disk: leave it out"
            raise OptionError(f"--cache-dir is {path}; {words}")
        if not prefix.on:
            words = "this engine has no prefix cache: leave it out, or give --cache-gib"
            raise OptionError(f"--cache-dir is {path}; {words}")
        made = repr(loaded.states) if loaded.folder is None else loaded.folder.manifest.encode()
        whole = f"{version('spark-engine')} {loaded.invariant} {made!r}"
        seed = blake2b(whole.encode(), digest_size=32).digest()
        folder = CacheFolder(Path(path).absolute(), DISK_BYTES if most is None else most)
        return DiskCache(folder, seed, prefix, self.scheduler.pages, store, loaded.states)

    def _executors(self) -> Mapping[BucketKey, Executor]:
        own, clock, trace = self.loaded.executors, self.loaded.clock, self._trace
        if not trace.on:
            return own
        return {key: TimedExecutor(one, clock, partial(trace.ran, key)) for key, one in own.items()}

    def _verify(self) -> tuple[tuple[int, ...], ...]:
        built, asked = self.loaded.limits.drafts, self.options.drafts
        most = built if asked is None else min(asked, built)
        rows = [self.loaded.buckets(verify_family(k)) for k in range(1, most + 1)]
        while rows and not rows[-1]:
            rows.pop()
        return tuple(rows)

    def _cache_bytes(self) -> int:
        """The option, or the budget found at loading; or else all rows and pages."""
        store = self.memory.store
        most = self.loaded.limits.pages * store.page_bytes
        most += store.snapshot_rows * store.snapshot_bytes
        given = (self.options.cache_bytes, self.loaded.cache_bytes, most)
        return min(most, next(n for n in given if n is not None))

    def _sizes(self) -> EngineSizes:
        loaded, limits, store = self.loaded, self.loaded.limits, self.memory.store
        most = limits.max_seqs * store.slot_bytes + limits.pages * store.page_bytes
        return EngineSizes(
            slots=limits.max_seqs,
            pages=limits.pages,
            page_size=limits.page_size,
            decode=loaded.rows(DECODE),
            verify=self._verify(),
            prefill=loaded.rows(PREFILL),
            tile=PREFILL_TILE,
            slot_bytes=store.slot_bytes,
            page_bytes=store.page_bytes,
            swap_bytes=min(self.options.swap_bytes, most),
            max_waiting=self.options.max_waiting,
            snapshots=store.snapshot_rows,
            snapshot_bytes=store.snapshot_bytes,
            cache_bytes=self._cache_bytes(),
            invariant=loaded.invariant,
            fixed=self.options.fixed_drafts,
            image_rows=limits.image_rows,
            makers=self._makers(),
            suffix=limits.suffix > 0,
        )

    def _makers(self) -> tuple[str, ...]:
        """What makes the drafts of rounds of 0, 1, 2, … drafts."""
        limits, names = self.loaded.limits, [s.spec.name for s in self.loaded.states]
        head, block = (any(n.startswith(h) for n in names) for h in (DRAFT_HEAD, BLOCK_DRAFTER))
        if not (head or block):
            return (COPIED,) * (1 + limits.drafts)
        return tuple(
            BLOCKS if block and (not head or drafts_by_block(k, limits.drafts)) else MTP
            for k in range(1 + limits.drafts)
        )
