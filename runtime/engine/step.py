"""The loop: schedule, fill, run, sample, finish.

Knows the order of things and what ends a sequence; which sequence runs is the scheduler's
business, what the arrays mean is `fill`'s. With `depth` 1 a step is launched before the
results of the one before it are read.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from spark_engine.errors import InternalError
from spark_engine.runtime.engine.fill import fill_launch, fill_tables
from spark_engine.runtime.engine.plan import Launch, Plan
from spark_engine.runtime.engine.request import Event, FinishReason, Status
from spark_engine.runtime.engine.scheduler import Scheduler
from spark_engine.runtime.engine.sequence import Sequence
from spark_engine.runtime.executors.executor import Executor, Wait
from spark_engine.runtime.executors.memory import BucketKey, Memory, Snapshot
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
class _Run:
    """A launched, uncollected launch."""

    launch: Launch
    outputs: Mapping[str, Array]
    wait: Wait


class Loop:
    """One engine's loop. Not thread-safe."""

    def __init__(
        self,
        scheduler: Scheduler,
        memory: Memory,
        executors: Mapping[BucketKey, Executor],
        depth: int = 0,
    ) -> None:
        self.scheduler = scheduler
        self.counts = Counts()
        self._memory = memory
        self._executors = executors
        self._depth = depth
        self._flights: deque[tuple[int, list[_Run]]] = deque()

    @property
    def in_flight(self) -> int:
        """Steps that were launched and not collected."""
        return len(self._flights)

    def step(self) -> list[Event]:
        """Does one step; returns what was sampled and who ended."""
        plan = self.scheduler.plan(self.in_flight)
        self._fill(plan)
        self._run(plan)
        return self._finish(self._collect(plan))

    def _fill(self, plan: Plan) -> None:
        for move in plan.saves:
            move.seq.snapshot = self._memory.save(move.slot, move.pages)
        for move in plan.restores:
            if not isinstance(move.seq.snapshot, Snapshot):
                raise InternalError(f"sequence {move.seq.id} has no snapshot to restore")
            self._memory.restore(move.seq.snapshot, move.slot, move.pages)
            move.seq.snapshot = None
        fill_tables(self._memory, plan)
        if plan.launches:
            self._memory.flush()

    def _run(self, plan: Plan) -> None:
        runs = []
        for launch in plan.launches:
            key = (launch.family, launch.bucket)
            buffers = self._memory.buffers(*key, plan.step % (self._depth + 1))
            fill_launch(buffers, launch)
            runs.append(_Run(launch, buffers, self._executors[key].launch(buffers)))
            self._count(launch)
        self.counts.steps += bool(runs)
        self._flights.append((plan.step, runs))

    def _collect(self, plan: Plan) -> list[_Run]:
        """Waits for the steps that are due: all of them when there is no reason to run ahead."""
        keep = self._depth if plan.launches and not plan.drain else 0
        ended: list[_Run] = []
        while len(self._flights) > keep:
            step, runs = self._flights.popleft()
            for run in runs:
                run.wait()
            ended += runs
            self.scheduler.collected(step)
        return ended

    def _finish(self, runs: list[_Run]) -> list[Event]:
        """Reads the outputs, which the next launch may overwrite, into events."""
        events: list[Event] = []
        for run in runs:
            self._finish_run(run, events)
        return events

    def _finish_run(self, run: _Run, events: list[Event]) -> None:
        """A row takes about half a microsecond here; there may be hundreds in a step."""
        out, launch, counts = run.outputs, run.launch, self.counts
        columns = [out[name][: launch.live].tolist() for name in ("next_tokens", "ok", "logprobs")]
        rows = zip(launch.seqs, launch.emits, *columns, strict=True)
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
            if token in seq.ends or len(known) >= seq.limit:
                reason = end_of(seq)
                if reason:
                    self.scheduler.finish(seq, reason)
            k = seq.request.params.logprobs
            if k is None:
                events.append(Event(seq.id, token, None, (), reason))
            else:
                events.append(Event(seq.id, token, logprob, _top(out, i, k), reason))

    def _count(self, launch: Launch) -> None:
        self.counts.buckets[launch.family, launch.bucket] += 1
        self.counts.padded_rows += launch.bucket - launch.live
        if launch.family == "prefill":
            self.counts.prefilled += sum(launch.counts)


def end_of(seq: Sequence) -> FinishReason | None:
    """Why the sequence ends with its last token, or None."""
    last = len(seq.tokens) - 1
    if seq.tokens[last] in seq.ends and not seq.forbids_end(last):
        return FinishReason.STOP
    return FinishReason.LENGTH if len(seq.tokens) >= seq.limit else None


def _top(out: Mapping[str, Array], row: int, count: int) -> tuple[tuple[int, float], ...]:
    ids, values = out["top_ids"][row, :count].tolist(), out["top_logprobs"][row, :count].tolist()
    return tuple(zip(ids, values, strict=True))
