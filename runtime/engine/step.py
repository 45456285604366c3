"""The loop: schedule, prepare, launch, collect, postprocess.

1. schedule: the scheduler decides which sequences prefill, decode and move; a `StepPlan`.
2. prepare: snapshots, table rows and masks are written as the plan says.
3. launch: each of its batches gets its inputs and is started on the executor of its bucket; the
   first runs while the second's inputs are written.
4. collect: waits for the step that is due; with `depth` 1 that is the one launched before this.
5. postprocess: the sampled tokens are appended, and become events; finished sequences are ended. A
   verify round adds one token or more; tokens after an end are dropped.

Where masks of a batch depend on tokens in flight, the batch is launched up to sampling, 4 and 5 are
done for the steps in flight, the masks are written, and then the launch is completed.

Knows this order and what ends a sequence; the scheduler chooses sequences, `prepare_inputs` knows
the arrays.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import repeat

import numpy as np

from spark_engine.errors import InternalError
from spark_engine.interface import PREFILL, SOURCES, drafts_of
from spark_engine.runtime.engine.draft_counts import BySource, DraftCounts
from spark_engine.runtime.engine.masks import EndedSequences, Masks
from spark_engine.runtime.engine.plan import Batch, StepPlan
from spark_engine.runtime.engine.policy.draft_depth import Ints
from spark_engine.runtime.engine.prepare_inputs import write_step_inputs, write_tables
from spark_engine.runtime.engine.request import Event, FinishReason, Status
from spark_engine.runtime.engine.scheduler import Scheduler
from spark_engine.runtime.engine.sequence import Sequence
from spark_engine.runtime.engine.trace import NoTrace
from spark_engine.runtime.executors.executor import Executor, Wait
from spark_engine.runtime.executors.memory import BucketKey, EngineMemory, Snapshot
from spark_engine.runtime.images.tower_inputs import fill_inputs
from spark_engine.tensors import Array
from spark_engine.vision import VISION, VisionInfo


@dataclass(slots=True)
class Counts:
    """Counters of the loop since its start; `buckets` counts launches by (family, rows).

    Those by position have an entry for each draft of the longest round, none without drafts.
    """

    steps: int = 0
    sampled: int = 0
    prefilled: int = 0
    padded_rows: int = 0
    surplus_rows: int = 0  # of ended sequences; of a round in which one ends, tokens
    errors: int = 0
    buckets: Counter[BucketKey] = field(default_factory=Counter)
    rounds_by_k: Counter[int] = field(default_factory=Counter)  # launches; decode is k = 0
    drafts_by_position: list[int] = field(default_factory=list)  # verified
    accepted_by_position: list[int] = field(default_factory=list)
    by_source: BySource = field(default_factory=dict)  # both, by what made the drafts


@dataclass(frozen=True, slots=True)
class _Launched:
    batch: Batch
    outputs: Mapping[str, Array]
    wait: Wait


@dataclass(frozen=True, slots=True)
class _Step:
    """A step in flight. `start`: seconds of `time.perf_counter`."""

    number: int
    start: float
    towers: list[BucketKey] = field(default_factory=list)
    launched: list[_Launched] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Sampled:
    """The tokens that a batch sampled, those of one sequence in their order: their sequences,
    indices in the outputs, and the position from 1 of each that was a draft, 0 of the others."""

    seqs: list[Sequence]
    at: slice | Array
    drafts: Iterable[int]


class Loop:
    """The loop of an engine. Not thread-safe."""

    def __init__(
        self,
        scheduler: Scheduler,
        memory: EngineMemory,
        executors: Mapping[BucketKey, Executor],
        masks: Masks,
        depth: int = 0,
        trace: NoTrace | None = None,
        vision: VisionInfo | None = None,
        vocab: int = 0,
    ) -> None:
        """`vision`, `vocab`: how images are read, the id that means the first row of one."""
        self.scheduler = scheduler
        self._trace = trace or NoTrace()
        self.counts = Counts()
        self._most_drafts = len(scheduler.sizes.verify)
        self.counts.drafts_by_position = [0] * self._most_drafts
        self.counts.accepted_by_position = [0] * self._most_drafts
        if self._most_drafts:
            sources = scheduler.sizes.sources
            self.counts.by_source = {s: DraftCounts.zeros(self._most_drafts) for s in sources}
        self._memory = memory
        self._executors = executors
        self._masks = masks
        self._depth = depth
        self._vision, self._vocab = vision, vocab
        self._towers = sorted(rows for family, rows in executors if family == VISION)
        self._seeing: dict[int, Wait] = {}  # by set of buffers: the tower's last launch
        self._in_flight: deque[_Step] = deque()
        self.started: list[tuple[int, float]] = []  # admitted in the last step: id, seconds
        self._free_at = 0.0  # seconds: when the executor had done what was last collected
        self.plan: StepPlan | None = None  # of the last step that was started

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def launched(self) -> list[tuple[int, list[Batch]]]:
        return [(s.number, [one.batch for one in s.launched]) for s in self._in_flight]

    def step(self) -> list[Event]:
        """Does one step; returns the sampled tokens and the ends of sequences."""
        self._trace.begin()
        events = self._end_polled()
        plan = self._schedule()
        late = self._find_late(plan)
        ended = self._prepare(plan, late)
        events += self._launch(plan, late)
        events += self._end(ended)
        # all that are due when there is no reason to run ahead
        keep = self._depth if plan.batches and not plan.drain else 0
        events += self._postprocess(self._collect(keep))
        self.keep_ended()
        self._trace.done("finish")
        return events

    def _end_polled(self) -> list[Event]:
        idle = self.plan is not None and not (self.plan.batches or self._in_flight)
        return self._end(self._masks.poll(idle))

    def _schedule(self) -> StepPlan:
        plan = self.plan = self.scheduler.schedule(self.in_flight)
        now = time.monotonic()
        self.started = [(seq.id, now) for seq in plan.admitted]
        self._trace.done("schedule")
        return plan

    def keep_ended(self) -> None:
        """Copies what ended sequences leave to the prefix cache, after every launch so far."""
        self.scheduler.keep_ended(self._memory.store.copy_rows)

    def _end(self, ended: EndedSequences) -> list[Event]:
        events = []
        for seq in ended.done:
            self.scheduler.finish(seq, FinishReason.STOP)
            events.append(seq.last_event(FinishReason.STOP))
        for seq, words in ended.failed:
            self.scheduler.finish(seq, FinishReason.ERROR)
            events.append(seq.last_event(FinishReason.ERROR, words))
        return events

    def _find_late(self, plan: StepPlan) -> Batch | None:
        """The batch with masks that depend on tokens in flight: only the first can be one, as
        the mask of a prompt's first token depends on none."""
        first = next(iter(plan.batches), None)
        if first is None or first.family == PREFILL or not (self._in_flight and first.bound):
            return None
        return first if self._masks.waits(first) else None

    def _prepare(self, plan: StepPlan, late: Batch | None) -> EndedSequences:
        """Writes what the plan changes, and all masks but those of `late`. Sequences that their
        grammar ends still run in this step; their results are not read."""
        store = self._memory.store
        for move in plan.saves:
            move.seq.swap_copy = store.save(move.slot, move.pages)
        for move in plan.restores:
            if not isinstance(move.seq.swap_copy, Snapshot):
                raise InternalError(f"sequence {move.seq.id} has no snapshot to restore")
            store.restore(move.seq.swap_copy, move.slot, move.pages)
            move.seq.swap_copy = None
        if plan.page_copies:
            store.copy_pages(plan.page_copies)
        for counts in plan.counts:
            store.set_counts(*counts)
        self._masks.follow_slots(plan)
        write_tables(self._memory, plan)
        ended = self._masks.write(b for b in plan.batches if b.bound and b is not late)
        if plan.batches:
            self._memory.flush()
        self._trace.done("prepare")
        return ended

    def _launch(self, plan: StepPlan, late: Batch | None) -> list[Event]:
        """Launches the plan's batches, `late` with the masks that the steps in flight decide;
        returns the events of those steps then."""
        step, events = _Step(plan.step, time.perf_counter()), list[Event]()
        if late is not None:
            complete = self._launch_to_sample(step, late)
            events += self._postprocess(self._collect(0))
            events += self._end(self._masks.write([late]))
            complete()
        self._compute_images(plan, step)
        for batch in plan.batches:
            if batch is not late:
                buffers = self._fill(step, batch)
                wait = self._executors[batch.key].launch(buffers)
                self._note_launch(step, _Launched(batch, buffers, wait))
        self._in_flight.append(step)
        return events

    def _compute_images(self, plan: StepPlan, step: _Step) -> None:
        """Launches the tower for the plan's images, one after the other."""
        for image, first in plan.images:
            assert self._vision is not None
            rows = next(n for n in self._towers if n >= image.tokens)
            at = plan.step % (self._depth + 1)
            if (before := self._seeing.pop(at, None)) is not None:
                before()  # buckets share their buffers
            buffers = self._memory.buffers(VISION, rows, at)
            fill_inputs(buffers, image, self._vision, first)
            self._seeing[at] = self._executors[VISION, rows].launch(buffers)
            self.counts.buckets[VISION, rows] += 1
            step.towers.append((VISION, rows))
            self._trace.done("image", (VISION, rows), image.tokens)

    def _launch_to_sample(self, step: _Step, batch: Batch) -> Callable[[], None]:
        """Launches the part before sampling; returns a function that launches the rest, with the
        masks written meanwhile."""
        buffers = self._fill(step, batch)
        rest = self._executors[batch.key].launch_to_sample(buffers)

        def complete() -> None:
            self._trace.done("masks", batch.key, batch.live)
            self._memory.flush()
            self._note_launch(step, _Launched(batch, buffers, rest()))

        return complete

    def _fill(self, step: _Step, batch: Batch) -> Mapping[str, Array]:
        # steps that are in flight together have different sets of buffers
        buffers = self._memory.buffers(*batch.key, step.number % (self._depth + 1))
        pool = self.scheduler.images if self._vision is not None else None
        write_step_inputs(buffers, batch, pool, self._vocab)
        self._trace.done("fill", batch.key, batch.live)
        return buffers

    def _note_launch(self, step: _Step, one: _Launched) -> None:
        batch, counts = one.batch, self.counts
        counts.steps += not step.launched
        step.launched.append(one)
        counts.buckets[batch.key] += 1
        counts.padded_rows += batch.bucket - batch.live
        if batch.family == PREFILL:
            counts.prefilled += sum(batch.counts)
        elif self._most_drafts:
            counts.rounds_by_k[drafts_of(batch.family)] += 1
        self._trace.done("launch", batch.key, batch.live)

    def _collect(self, keep: int) -> list[_Launched]:
        """Waits for the steps in flight, but for the last `keep`."""
        ended: list[_Launched] = []
        while len(self._in_flight) > keep:
            step = self._in_flight.popleft()
            for one in step.launched:
                one.wait()
                self._trace.done("wait", one.batch.key, one.batch.live)
            ended += step.launched
            self.scheduler.collected(step.number)
            # its time counts from when the executor was free for it
            start, self._free_at = max(step.start, self._free_at), time.perf_counter()
            took = (self._free_at - start) * 1e6
            self.scheduler.pacing.took([one.batch for one in step.launched], took, step.towers)
        return ended

    def _postprocess(self, collected: list[_Launched]) -> list[Event]:
        """Reads the outputs, which the next launch may overwrite, into events."""
        return [event for one in collected for event in self._events_of(one)]

    def _events_of(self, one: _Launched) -> list[Event]:
        """A token takes about half a microsecond here; there may be hundreds in a step."""
        out, counts, events = one.outputs, self.counts, list[Event]()
        sampled = self._sampled(one)
        columns = [out[name][sampled.at].tolist() for name in ("next_tokens", "ok", "logprobs")]
        tops = out["top_ids"][sampled.at], out["top_logprobs"][sampled.at]
        for i, (seq, draft, token, ok, logprob) in enumerate(
            zip(sampled.seqs, sampled.drafts, *columns, strict=True)
        ):
            if seq.status is Status.FINISHED:
                counts.surplus_rows += 1
                continue
            if not ok:
                counts.errors += 1
                self.scheduler.finish(seq, FinishReason.ERROR, sound=False)
                events.append(seq.last_event(FinishReason.ERROR, "non-finite logits"))
                continue
            counts.sampled += 1
            seq.accepted += draft > 0
            if draft and seq.by_source is not None:
                seq.by_source[seq.draft_source].kept[draft - 1] += 1
            known, reason = seq.tokens, None
            known.append(token)
            if token in seq.stop_ids or len(known) >= seq.limit:
                reason = seq.ended_by
                if reason:
                    self.scheduler.finish(seq, reason)
            if seq.constraint is not None and not reason:
                words = self._masks.advance(seq, token)
                if words:
                    events += self._end(EndedSequences(failed=[(seq, words)]))
                    continue
            k = seq.request.params.logprobs
            more = "", seq.drafted, seq.accepted, seq.cached, seq.by_source
            if k is None:
                events.append(Event(seq.id, token, None, (), reason, *more))
            else:
                events.append(Event(seq.id, token, logprob, _top(*tops, i, k), reason, *more))
        return events

    def _sampled(self, one: _Launched) -> _Sampled:
        batch, drafts = one.batch, drafts_of(one.batch.family)
        if batch.family == PREFILL:
            at = np.flatnonzero(batch.emits)
            return _Sampled([batch.seqs[i] for i in at.tolist()], at, repeat(0, len(at)))
        found = _Sampled(batch.seqs, slice(batch.live), repeat(0, batch.live))
        if drafts:
            accepted = one.outputs["accepted"][: batch.live].astype(np.int64)
            found = self._apply_verification(batch, accepted)
        if batch.known:
            found = _without_known(found, batch)
        if self._most_drafts:
            slots = np.array([seq.slot for seq in batch.seqs])
            matched = one.outputs.get("matched", np.zeros(batch.live))[: batch.live]
            live = slots >= 0
            self.scheduler.depth.drafted(slots[live], drafts, matched[live].astype(np.int64))
        return found

    def _apply_verification(self, batch: Batch, accepted: Ints) -> _Sampled:
        """Takes back launched tokens that were rejected. `accepted`: tokens of each row, from 1."""
        offered, kept = np.array(batch.counts, np.int64) - 1, accepted - 1
        if (kept < 0).any() or (kept > offered).any():
            raise InternalError(f"of {batch.counts} tokens {accepted.tolist()} were accepted")
        source = self.scheduler.depth.makers_of([seq.slot for seq in batch.seqs])
        for row, (seq, most, got) in enumerate(
            zip(batch.seqs, offered.tolist(), kept.tolist(), strict=True)
        ):
            seq.launched -= most - got
            seq.unverified -= most
            seq.drafted += most
            if seq.by_source is not None:
                seq.draft_source = SOURCES[source[row]]
                seq.by_source[seq.draft_source].reach(most)
        self._count_drafts(batch, source, offered, kept)
        index = np.arange(1 + drafts_of(batch.family))
        seqs = [s for s, n in zip(batch.seqs, accepted.tolist(), strict=True) for _ in range(n)]
        taken = index < accepted[:, None]
        drafts = np.where(index < kept[:, None], index + 1, 0)[taken].tolist()
        return _Sampled(seqs, np.flatnonzero(taken), drafts)

    def _count_drafts(self, batch: Batch, source: Ints, offered: Ints, kept: Ints) -> None:
        """Counts the drafts of the sequences that had not ended."""
        slots = np.array([seq.slot for seq in batch.seqs])
        live = (slots >= 0) & (offered > 0)
        if not live.any():
            return
        source, offered, kept, counts = source[live], offered[live], kept[live], self.counts
        self.scheduler.depth.observe(slots[live], offered, kept)
        for of in {*source.tolist()}:
            counts.by_source[SOURCES[of]].add(offered[source == of], kept[source == of])
        DraftCounts(counts.drafts_by_position, counts.accepted_by_position).add(offered, kept)


def _without_known(found: _Sampled, batch: Batch) -> _Sampled:
    """Without what rows sampled again."""
    again = {seq.id for seq, emit in zip(batch.seqs, batch.emits, strict=True) if not emit}
    kept = [i for i, seq in enumerate(found.seqs) if seq.id not in again]
    at = np.arange(found.at.stop) if isinstance(found.at, slice) else found.at
    drafts = [*found.drafts]
    return _Sampled([found.seqs[i] for i in kept], at[kept], [drafts[i] for i in kept])


def _top(ids: Array, values: Array, row: int, count: int) -> tuple[tuple[int, float], ...]:
    return tuple(zip(ids[row, :count].tolist(), values[row, :count].tolist(), strict=True))
