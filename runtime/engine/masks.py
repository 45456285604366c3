"""Token masks: computes which ids each sequence may have next, in time for its step.

Masks are computed in a few threads while the device computes what needs none; grammars are compiled
in others, which may take long. If its mask takes longer than SLOW, a sequence runs only in steps
that find it ready; if it takes longer than BOUND, the request ends. So a slow mask delays at most
one step of other requests.

Knows constraint states, threads and two tables; no scheduler.
"""

import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from spark_engine.errors import InternalError
from spark_engine.interface import SAMPLING_I
from spark_engine.runtime.engine.constraint import Grammars
from spark_engine.runtime.engine.plan import Batch, StepPlan
from spark_engine.runtime.engine.request import SLOW_GRAMMAR, Status
from spark_engine.runtime.engine.sequence import Sequence
from spark_engine.runtime.engine.token_constraint_state import (
    ConstraintState,
    MaskDependency,
    MaskResult,
)
from spark_engine.runtime.executors.memory import EngineMemory

BOUND = 1.0  # seconds of a mask, after which the request ends
COMPILED = 10.0  # seconds of compiling the grammar and the first mask, likewise
SLOW = 0.01  # seconds of a mask, after which it is computed between steps
PAUSE = 0.002  # seconds that a step without work waits for a mask
THREADS = 8  # of masks, and as many of compiling grammars
FLAG = SAMPLING_I.index("masked")
ALLOW, FLAGS = ("allow",), ("sampling_i",)


@dataclass(slots=True)
class EndedSequences:
    """Sequences that end, since their grammar allows no more tokens, or failed (with the error)."""

    done: list[Sequence] = field(default_factory=list)
    failed: list[tuple[Sequence, str]] = field(default_factory=list)


class Masks:
    """The masks of an engine; one thread owns it. `grammars` None: no request has a grammar."""

    def __init__(self, memory: EngineMemory, grammars: Grammars | None) -> None:
        self._memory, self._grammars = memory, grammars
        self._makers, self._fillers = _Threads("grammar"), _Threads("masks")
        self._make, self._fill = self._makers.submit, self._fillers.submit
        # By id those with a grammar being compiled, or a mask that no step waits for.
        self._in_progress: dict[int, Sequence] = {}
        self.bound, self.compiled, self.slow = BOUND, COMPILED, SLOW

    def begin(self, seq: Sequence) -> None:
        state = seq.constraint
        if state is not None and state.spec.grammar and self._grammars is not None:
            state.compile(self._make, self._grammars)
            self._in_progress[seq.id] = seq

    def follow_slots(self, plan: StepPlan) -> None:
        """Preempted sequences resume once their masks are ready; a new table row has no mask."""
        lost = (s for s in plan.preempted if s.constraint is not None and not s.constraint.ready)
        self._in_progress |= {seq.id: seq for seq in lost}
        for seq in plan.admitted:
            if seq.constraint is not None and seq.slot >= 0:
                seq.constraint.flagged = False

    def poll(self, idle: bool) -> EndedSequences:
        """Checks the jobs in progress; returns sequences that failed or took too long. With `idle`
        it waits PAUSE at most for a change, since there is nothing else to do."""
        ended = EndedSequences()
        if not self._in_progress:
            return ended
        states = [seq.constraint for seq in self._in_progress.values()]
        jobs = [state.job for state in states if state and state.job]
        if idle and jobs and not any(job.done() for job in jobs):
            wait(jobs, PAUSE, FIRST_COMPLETED)
        late, now = [], time.monotonic()
        for seq in [*self._in_progress.values()]:
            state = seq.constraint
            if seq.status is Status.FINISHED or state is None or state.ready:
                if state is not None:
                    state.paused = False  # the job's result, or error, is read with its mask
                del self._in_progress[seq.id]
            elif now - state.asked > self._most(state):
                late.append((seq, state))
        for seq, state in self._started(late):
            del self._in_progress[seq.id]
            ended.failed.append((seq, _too_long(self._most(state))))
        return ended

    def _most(self, state: ConstraintState) -> float:
        return self.bound if state.compiled else self.compiled

    def advance(self, seq: Sequence, token: int) -> str:
        """Adds a token that was read to an unfinished sequence's state and asks for its next mask.
        Returns the error of the token, "" for none."""
        state = seq.constraint
        if state is None:
            return ""
        try:
            state.advance(token)
        except InternalError as error:
            return str(error)
        if state.has_pending:  # until then the first job's result is valid
            state.ask(self._fill)
            if state.paused:
                self._in_progress[seq.id] = seq
        return ""

    def waits(self, batch: Batch) -> bool:
        """True if a mask of the batch depends on tokens in flight."""
        rows = ((s.constraint, i) for s, i in batch.bound if s.constraint is not None)
        return any(state.dependency(i) is MaskDependency.TOKENS for state, i in rows)

    def write(self, batches: Iterable[Batch]) -> EndedSequences:
        """Writes the masks of the batches' tokens, all tokens before them having been read. A row
        of a sequence that ends has any mask. Takes at most twice the bound for each batch."""
        ended = EndedSequences()
        for batch in batches:
            late = self._write_ready(batch.bound, ended)
            if not late:
                continue
            states = [(seq, seq.constraint) for seq, _ in late if seq.constraint is not None]
            lost = {seq.id: seq for seq, _ in self._started(states)}
            again = self._write_ready([row for row in late if row[0].id not in lost], ended)
            for seq in (*lost.values(), *(seq for seq, _ in again)):
                ended.failed.append((seq, _too_long(self.bound)))
        return ended

    def _write_ready(
        self, rows: Iterable[tuple[Sequence, int]], ended: EndedSequences
    ) -> list[tuple[Sequence, int]]:
        """Writes masks that are ready within the bound; returns the rows of the others."""
        deadline, late = time.monotonic() + self.bound, []
        for seq, index in rows:
            state = seq.constraint
            if state is None or seq.status is Status.FINISHED:
                continue
            try:
                self._write(seq, state, index, deadline, ended)
            except TimeoutError:
                late.append((seq, index))
            except Exception as error:  # a grammar's: it ends that request alone
                ended.failed.append((seq, f"the grammar failed: {error}"))
        return late

    def _write(
        self,
        seq: Sequence,
        state: ConstraintState,
        index: int,
        deadline: float,
        ended: EndedSequences,
    ) -> None:
        tables, slot = self._memory.tables, seq.slot
        if state.dependency(index) is MaskDependency.TOKENS and state.asks:
            result = self._read(state, deadline)
            state.slow = result.seconds > self.slow
            if result.done:
                ended.done.append(seq)
                return
            mask = state.without_barred(result.mask)
            state.paused = state.slow
        else:
            mask = state.mask(index)
        if mask is not None:
            tables["allow"][slot] = mask
            self._memory.mark(slot, ALLOW)
        if (mask is not None) != state.flagged:
            state.flagged = mask is not None
            tables["sampling_i"][slot, FLAG] = state.flagged
            self._memory.mark(slot, FLAGS)

    def _read(self, state: ConstraintState, deadline: float) -> MaskResult:
        """The grammar's result for the next token. Raises TimeoutError at the deadline."""
        if state.job is None:
            raise InternalError("no mask was requested of the grammar")
        error = state.job.exception(max(0.0, deadline - time.monotonic()))
        if error is not None:  # a library's panic is a BaseException, and not a reason to exit
            raise InternalError(str(error)) from error
        return state.job.result()

    def _started(
        self, late: list[tuple[Sequence, ConstraintState]]
    ) -> list[tuple[Sequence, ConstraintState]]:
        """Moves late jobs that were never started, since others occupied the threads, to new
        threads; returns those others."""
        for threads, compiled in ((self._makers, False), (self._fillers, True)):
            if any(state.compiled == compiled for _, state in late):
                threads.abandon()
        started = []
        for seq, state in late:
            if state.job is None or not state.job.cancel():
                started.append((seq, state))
            else:
                state.resubmit(self._fill if state.compiled else self._make)
        return started

    def close(self) -> None:
        """Ends the threads when their jobs are done. May be called twice."""
        for threads in (self._makers, self._fillers):
            threads.abandon(cancel=True)


class _Threads:
    """A thread pool, created on first use."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, job: Callable[[], MaskResult]) -> Future[MaskResult]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), self._name)
        return self._pool.submit(job)

    def abandon(self, cancel: bool = False) -> None:
        """Leaves the threads to their jobs; the next job gets new ones. `cancel`: jobs that were
        not started."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=cancel)
            self._pool = None


def _too_long(bound: float) -> str:
    words = f"{SLOW_GRAMMAR} {bound:g} s to say what may come next"
    return f"{words}: send a smaller one, or send it again when the server has less to do"
