"""The loop: schedule, prepare, launch, collect, postprocess.

1. schedule: the scheduler decides who prefills, who decodes and what moves; a `StepPlan`.
2. prepare: snapshots and table rows are written as the plan says.
3. launch: each of its batches gets its inputs and is started on the executor of its bucket; the
   first runs while the second's inputs are written. Where masks depend on a step in flight, the
   part before sampling is started, that step is collected, and with its tokens the masks are
   written; then the rest is started.
4. collect: waits for the step that is due; with `depth` 1 that is the one launched before this.
5. postprocess: the sampled tokens are appended, and become events; who is done is ended. A round
   of drafts brings one token or more; what it has behind an end is dropped.

Knows the order of things and what ends a sequence; which sequence runs is the scheduler's
business, what the arrays mean is `prepare_inputs`'.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import repeat
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from spark_engine.errors import InternalError
from spark_engine.interface import PREFILL, drafts_of
from spark_engine.runtime.engine.masks import Ended, Masks
from spark_engine.runtime.engine.plan import Batch, StepPlan
from spark_engine.runtime.engine.prepare_inputs import write_step_inputs, write_tables
from spark_engine.runtime.engine.request import Event, FinishReason, Status
from spark_engine.runtime.engine.scheduler import Scheduler
from spark_engine.runtime.engine.sequence import Sequence
from spark_engine.runtime.engine.trace import NoTrace
from spark_engine.runtime.executors.executor import Executor, Wait
from spark_engine.runtime.executors.memory import BucketKey, EngineMemory, Snapshot
from spark_engine.tensors import Array


@dataclass(slots=True)
class Counts:
    """What the loop did since it was made; `buckets` counts launches by (family, rows).

    Those by position have an entry for each draft of the longest round, none without drafts.
    """

    steps: int = 0
    sampled: int = 0
    prefilled: int = 0
    padded_rows: int = 0
    surplus_rows: int = 0  # ran for a sequence that had ended; of a round that it ended in, tokens
    errors: int = 0
    buckets: Counter[BucketKey] = field(default_factory=Counter)
    rounds_by_k: Counter[int] = field(default_factory=Counter)  # launches; decode is k = 0
    drafts_by_position: list[int] = field(default_factory=list)  # verified
    accepted_by_position: list[int] = field(default_factory=list)  # and kept


@dataclass(frozen=True, slots=True)
class _Launched:
    """A batch that was launched and not collected."""

    batch: Batch
    outputs: Mapping[str, Array]
    wait: Wait


Ints: TypeAlias = npt.NDArray[np.int64]
# Whose tokens a batch sampled, where each lies in the outputs, and whether it was a draft; those of
# one sequence follow each other in their order.
_Sampled: TypeAlias = tuple[list[Sequence], slice | Array, Iterable[int]]


class Loop:
    """One engine's loop. Not thread-safe."""

    def __init__(
        self,
        scheduler: Scheduler,
        memory: EngineMemory,
        executors: Mapping[BucketKey, Executor],
        masks: Masks,
        depth: int = 0,
        trace: NoTrace | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._trace = trace or NoTrace()
        self.counts = Counts()
        self.counts.drafts_by_position = [0] * scheduler.depth.most
        self.counts.accepted_by_position = [0] * scheduler.depth.most
        self._memory = memory
        self._executors = executors
        self._masks = masks
        self._depth = depth
        self._in_flight: deque[tuple[int, float, list[_Launched]]] = deque()  # step, seconds
        self.begun: list[tuple[int, float]] = []  # who got a slot in the last step, and when
        self._free_at = 0.0  # seconds: when the executor had done what was last collected
        self.plan: StepPlan | None = None  # of the last step that was begun

    @property
    def in_flight(self) -> int:
        """Steps that were launched and not collected."""
        return len(self._in_flight)

    @property
    def launched(self) -> list[tuple[int, list[Batch]]]:
        """Their numbers and batches."""
        return [(step, [one.batch for one in all_]) for step, _, all_ in self._in_flight]

    def step(self) -> list[Event]:
        """Does one step; returns what was sampled and who ended."""
        self._trace.begin()
        idle = self.plan is not None and not (self.plan.batches or self._in_flight)
        events = self._end(self._masks.poll(idle))
        plan = self.plan = self.scheduler.schedule(self.in_flight)
        now = time.monotonic()
        self.begun = [(seq.id, now) for seq in plan.admitted]
        self._trace.done("schedule")
        ended = self._prepare(plan)
        self._trace.done("prepare")
        self._launch(plan, events)
        events += self._end(ended)
        # all that are due when there is no reason to run ahead
        keep = self._depth if plan.batches and not plan.drain else 0
        self._postprocess(self._collect(keep), events)
        self.keep_ended()
        self._trace.done("finish")
        return events

    def keep_ended(self) -> None:
        """Copies what those that ended leave to the prefix cache, behind every launch so far."""
        self._memory.copy_rows(self.scheduler.reuse.copies)
        self.scheduler.reuse.settled()

    def _prepare(self, plan: StepPlan) -> Ended:
        """Who is ended by a grammar runs in this step still, and nobody reads it."""
        for move in plan.saves:
            move.seq.snapshot = self._memory.save(move.slot, move.pages)
        for move in plan.restores:
            if not isinstance(move.seq.snapshot, Snapshot):
                raise InternalError(f"sequence {move.seq.id} has no snapshot to restore")
            self._memory.restore(move.seq.snapshot, move.slot, move.pages)
            move.seq.snapshot = None
        self._memory.copy_pages(plan.page_copies)
        for counts in plan.counts:
            self._memory.set_counts(*counts)
        ended = Ended()
        self._masks.watch(plan.preempted)
        write_tables(self._memory, plan)
        for batch in plan.batches:
            if batch.bound and not self._is_behind(batch):
                self._masks.write(batch, ended)
        if plan.batches:
            self._memory.flush()
        return ended

    def _is_behind(self, batch: Batch) -> bool:
        """Whether its masks depend on tokens of a step in flight. A prompt's first one does not."""
        in_flight = bool(self._in_flight) and batch.family != PREFILL
        return in_flight and bool(batch.bound) and self._masks.waits(batch)

    def _launch(self, plan: StepPlan, events: list[Event]) -> None:
        launched, start = [], time.perf_counter()
        for batch in plan.batches:
            key = (batch.family, batch.bucket)
            # steps that are in flight together have different sets of buffers
            buffers = self._memory.buffers(*key, plan.step % (self._depth + 1))
            write_step_inputs(buffers, batch)
            self._trace.done("fill", key, batch.live)
            if self._is_behind(batch):
                wait = self._launch_behind(batch, buffers, events)
            else:
                wait = self._executors[key].launch(buffers)
            launched.append(_Launched(batch, buffers, wait))
            self._count(batch)
            self._trace.done("launch", key, batch.live)
        self.counts.steps += bool(launched)
        self._in_flight.append((plan.step, start, launched))

    def _launch_behind(
        self, batch: Batch, buffers: Mapping[str, Array], events: list[Event]
    ) -> Wait:
        """Launches the part before sampling, collects the steps in flight, and launches the rest
        with the masks that follow from their tokens."""
        key = (batch.family, batch.bucket)
        rest = self._executors[key].launch_to_sample(buffers)
        self._postprocess(self._collect(0), events)
        ended = Ended()
        self._masks.write(batch, ended)
        events += self._end(ended)
        self._trace.done("masks", key, batch.live)
        self._memory.flush()
        return rest()

    def _end(self, ended: Ended) -> list[Event]:
        """Ends whom a grammar has ended."""
        events = []
        for seq in ended.done:
            self.scheduler.finish(seq, FinishReason.STOP)
            events.append(end_event(seq, FinishReason.STOP))
        for seq, words in ended.failed:
            self.scheduler.finish(seq, FinishReason.ERROR)
            events.append(end_event(seq, FinishReason.ERROR, words))
        return events

    def _collect(self, keep: int) -> list[_Launched]:
        """Waits for the steps in flight, but for the last `keep`."""
        ended: list[_Launched] = []
        while len(self._in_flight) > keep:
            step, start, launched = self._in_flight.popleft()
            for one in launched:
                one.wait()
                self._trace.done("wait", (one.batch.family, one.batch.bucket), one.batch.live)
            ended += launched
            self.scheduler.collected(step)
            self._time(launched, start)
        return ended

    def _time(self, launched: list[_Launched], start: float) -> None:
        """Tells the pacing how long a step took, from when the executor was free for it."""
        begun, self._free_at = max(start, self._free_at), time.perf_counter()
        took = (self._free_at - begun) * 1e6
        self.scheduler.pacing.took([one.batch for one in launched], took)

    def _postprocess(self, collected: list[_Launched], events: list[Event]) -> None:
        """Reads the outputs, which the next launch may overwrite, into events."""
        for one in collected:
            self._postprocess_batch(one, events)

    def _postprocess_batch(self, one: _Launched, events: list[Event]) -> None:
        """A token takes about half a microsecond here; there may be hundreds in a step."""
        out, counts = one.outputs, self.counts
        seqs, at, drafts = self._sampled(one)
        columns = [out[name][at].tolist() for name in ("next_tokens", "ok", "logprobs")]
        tops = out["top_ids"][at], out["top_logprobs"][at]
        for i, (seq, draft, token, ok, logprob) in enumerate(
            zip(seqs, drafts, *columns, strict=True)
        ):
            if seq.status is Status.FINISHED:
                counts.surplus_rows += 1
                continue
            if not ok:
                counts.errors += 1
                self.scheduler.finish(seq, FinishReason.ERROR, sound=False)
                events.append(end_event(seq, FinishReason.ERROR, "non-finite logits"))
                continue
            counts.sampled += 1
            seq.accepted += draft
            known, reason = seq.tokens, None
            known.append(token)
            if token in seq.stop_ids or len(known) >= seq.limit:
                reason = end_of(seq)
                if reason:
                    self.scheduler.finish(seq, reason)
            if seq.guide is not None and not reason:
                words = self._masks.advance(seq, token)
                if words:
                    events += self._end(Ended(failed=[(seq, words)]))
                    continue
            k = seq.request.params.logprobs
            more = "", seq.drafted, seq.accepted, seq.cached
            if k is None:
                events.append(Event(seq.id, token, None, (), reason, *more))
            else:
                events.append(Event(seq.id, token, logprob, _top(*tops, i, k), reason, *more))

    def _sampled(self, one: _Launched) -> _Sampled:
        batch = one.batch
        if drafts_of(batch.family):
            return self._settle(batch, one.outputs["accepted"][: batch.live].astype(np.int64))
        if batch.family != PREFILL:
            return batch.seqs, slice(batch.live), repeat(0, batch.live)
        at = np.flatnonzero(batch.emits)
        return [batch.seqs[i] for i in at.tolist()], at, repeat(0, len(at))

    def _settle(self, batch: Batch, accepted: Ints) -> _Sampled:
        """Takes back what was launched and not kept. `accepted`: tokens of each row, from 1."""
        offered, kept = np.array(batch.counts, np.int64) - 1, accepted - 1
        if (kept < 0).any() or (kept > offered).any():
            raise InternalError(f"of {batch.counts} tokens {accepted.tolist()} were accepted")
        for seq, most, got in zip(batch.seqs, offered.tolist(), kept.tolist(), strict=True):
            seq.launched -= most - got
            seq.slack -= most
            seq.drafted += most
        self._measure(batch, offered, kept)
        index = np.arange(1 + drafts_of(batch.family))
        seqs = [s for s, n in zip(batch.seqs, accepted.tolist(), strict=True) for _ in range(n)]
        taken = index < accepted[:, None]
        return seqs, np.flatnonzero(taken), (index < kept[:, None])[taken].tolist()

    def _measure(self, batch: Batch, offered: Ints, kept: Ints) -> None:
        """Counts the drafts of the sequences that had not ended."""
        slots = np.array([seq.slot for seq in batch.seqs])
        live = (slots >= 0) & (offered > 0)
        if not live.any():
            return
        offered, kept, counts = offered[live], kept[live], self.counts
        self.scheduler.depth.observe(slots[live], offered, kept)
        for total, rows in (
            (counts.drafts_by_position, offered),
            (counts.accepted_by_position, kept),
        ):
            for i, n in enumerate(np.bincount(rows)[:0:-1].cumsum()[::-1].tolist()):
                total[i] += n

    def _count(self, batch: Batch) -> None:
        self.counts.buckets[batch.family, batch.bucket] += 1
        self.counts.padded_rows += batch.bucket - batch.live
        if batch.family == PREFILL:
            self.counts.prefilled += sum(batch.counts)
        elif self.scheduler.depth.most:
            self.counts.rounds_by_k[drafts_of(batch.family)] += 1


def end_of(seq: Sequence) -> FinishReason | None:
    """Why the sequence ends with its last token, or None."""
    last = len(seq.tokens) - 1
    if seq.tokens[last] in seq.stop_ids and not seq.forbids_stop(last):
        return FinishReason.STOP
    return FinishReason.LENGTH if len(seq.tokens) >= seq.limit else None


def end_event(seq: Sequence, reason: FinishReason, message: str = "") -> Event:
    """The last event of a sequence that ends without a token."""
    more = seq.drafted, seq.accepted, seq.cached
    return Event(seq.id, None, None, (), reason, message, *more)


def _top(ids: Array, values: Array, row: int, count: int) -> tuple[tuple[int, float], ...]:
    return tuple(zip(ids[row, :count].tolist(), values[row, :count].tolist(), strict=True))
