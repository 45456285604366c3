"""The loop: schedule, prepare, launch, collect, postprocess.

1. schedule: the scheduler decides who prefills, who decodes and what moves; a `StepPlan`.
2. prepare: snapshots and table rows are written as the plan says.
3. launch: each of its batches gets its inputs and is started on the executor of its bucket; the
   first runs while the second's inputs are written.
4. collect: waits for the step that is due; with `depth` 1 that is the one launched before this.
5. postprocess: the sampled tokens are appended, and become events; who is done is ended.

Knows the order of things and what ends a sequence; which sequence runs is the scheduler's
business, what the arrays mean is `prepare_inputs`'.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from spark_engine.errors import InternalError
from spark_engine.runtime.engine.plan import Batch, StepPlan
from spark_engine.runtime.engine.prepare_inputs import write_step_inputs, write_tables
from spark_engine.runtime.engine.request import Event, FinishReason, Status
from spark_engine.runtime.engine.scheduler import Scheduler
from spark_engine.runtime.engine.sequence import Sequence
from spark_engine.runtime.executors.executor import Executor, Wait
from spark_engine.runtime.executors.memory import BucketKey, EngineMemory, Snapshot
from spark_engine.tensors import Array


@dataclass(slots=True)
class Counts:
    """What the loop did since it was made; `buckets` counts launches by (family, rows)."""

    steps: int = 0
    sampled: int = 0
    prefilled: int = 0
    padded_rows: int = 0
    surplus_rows: int = 0  # ran for a sequence that turned out to have ended
    errors: int = 0
    buckets: Counter[BucketKey] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class _Launched:
    """A batch that was launched and not collected."""

    batch: Batch
    outputs: Mapping[str, Array]
    wait: Wait


class Loop:
    """One engine's loop. Not thread-safe."""

    def __init__(
        self,
        scheduler: Scheduler,
        memory: EngineMemory,
        executors: Mapping[BucketKey, Executor],
        depth: int = 0,
    ) -> None:
        self.scheduler = scheduler
        self.counts = Counts()
        self._memory = memory
        self._executors = executors
        self._depth = depth
        self._in_flight: deque[tuple[int, list[_Launched]]] = deque()

    @property
    def in_flight(self) -> int:
        """Steps that were launched and not collected."""
        return len(self._in_flight)

    def step(self) -> list[Event]:
        """Does one step; returns what was sampled and who ended."""
        plan = self.scheduler.schedule(self.in_flight)
        self._prepare(plan)
        self._launch(plan)
        return self._postprocess(self._collect(plan))

    def _prepare(self, plan: StepPlan) -> None:
        for move in plan.saves:
            move.seq.snapshot = self._memory.save(move.slot, move.pages)
        for move in plan.restores:
            if not isinstance(move.seq.snapshot, Snapshot):
                raise InternalError(f"sequence {move.seq.id} has no snapshot to restore")
            self._memory.restore(move.seq.snapshot, move.slot, move.pages)
            move.seq.snapshot = None
        write_tables(self._memory, plan)
        if plan.batches:
            self._memory.flush()

    def _launch(self, plan: StepPlan) -> None:
        launched = []
        for batch in plan.batches:
            key = (batch.family, batch.bucket)
            # steps that are in flight together have different sets of buffers
            buffers = self._memory.buffers(*key, plan.step % (self._depth + 1))
            write_step_inputs(buffers, batch)
            launched.append(_Launched(batch, buffers, self._executors[key].launch(buffers)))
            self._count(batch)
        self.counts.steps += bool(launched)
        self._in_flight.append((plan.step, launched))

    def _collect(self, plan: StepPlan) -> list[_Launched]:
        """Waits for the steps that are due: all of them when there is no reason to run ahead."""
        keep = self._depth if plan.batches and not plan.drain else 0
        ended: list[_Launched] = []
        while len(self._in_flight) > keep:
            step, launched = self._in_flight.popleft()
            for one in launched:
                one.wait()
            ended += launched
            self.scheduler.collected(step)
        return ended

    def _postprocess(self, collected: list[_Launched]) -> list[Event]:
        """Reads the outputs, which the next launch may overwrite, into events."""
        events: list[Event] = []
        for one in collected:
            self._postprocess_batch(one, events)
        return events

    def _postprocess_batch(self, one: _Launched, events: list[Event]) -> None:
        """A row takes about half a microsecond here; there may be hundreds in a step."""
        out, batch, counts = one.outputs, one.batch, self.counts
        columns = [out[name][: batch.live].tolist() for name in ("next_tokens", "ok", "logprobs")]
        rows = zip(batch.seqs, batch.emits, *columns, strict=True)
        for i, (seq, emit, token, ok, logprob) in enumerate(rows):
            if not emit:
                continue
            if seq.status is Status.FINISHED:
                counts.surplus_rows += 1
                continue
            if not ok:
                counts.errors += 1
                self.scheduler.finish(seq, FinishReason.ERROR)
                message = "non-finite logits"
                events.append(Event(seq.id, finish=FinishReason.ERROR, message=message))
                continue
            counts.sampled += 1
            known, reason = seq.tokens, None
            known.append(token)
            if token in seq.stop_ids or len(known) >= seq.limit:
                reason = end_of(seq)
                if reason:
                    self.scheduler.finish(seq, reason)
            k = seq.request.params.logprobs
            if k is None:
                events.append(Event(seq.id, token, None, (), reason))
            else:
                events.append(Event(seq.id, token, logprob, _top(out, i, k), reason))

    def _count(self, batch: Batch) -> None:
        self.counts.buckets[batch.family, batch.bucket] += 1
        self.counts.padded_rows += batch.bucket - batch.live
        if batch.family == "prefill":
            self.counts.prefilled += sum(batch.counts)


def end_of(seq: Sequence) -> FinishReason | None:
    """Why the sequence ends with its last token, or None."""
    last = len(seq.tokens) - 1
    if seq.tokens[last] in seq.stop_ids and not seq.forbids_stop(last):
        return FinishReason.STOP
    return FinishReason.LENGTH if len(seq.tokens) >= seq.limit else None


def _top(out: Mapping[str, Array], row: int, count: int) -> tuple[tuple[int, float], ...]:
    ids, values = out["top_ids"][row, :count].tolist(), out["top_logprobs"][row, :count].tolist()
    return tuple(zip(ids, values, strict=True))
