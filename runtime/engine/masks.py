"""Token masks: computes which ids each sequence may have next, in time for its step.

Grammars work in a few threads while the device computes what needs no mask; they are made in
others, which may take long. One that takes longer than SLOW runs only in steps that find its mask
ready; one that takes longer than BOUND ends its request. So nobody else's step waits for it but the
one in which that is found out.

Knows guides, threads and two tables; not who runs when.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from spark_engine.errors import InternalError
from spark_engine.interface import SAMPLING_I
from spark_engine.runtime.engine.constraint import Grammars
from spark_engine.runtime.engine.guide import Answer, Guide, Need
from spark_engine.runtime.engine.plan import Batch
from spark_engine.runtime.engine.request import Status
from spark_engine.runtime.engine.sequence import Sequence
from spark_engine.runtime.executors.memory import EngineMemory

BOUND = 1.0  # seconds of a mask, after which the request ends; COMPILED: of making the grammar too
COMPILED = 10.0
SLOW = 0.01  # seconds of a mask, after which it is made between steps
PAUSE = 0.002  # seconds that a step without work waits for a mask
THREADS = 8  # of masks, and as many of making grammars
FLAG = SAMPLING_I.index("masked")
ALLOW, FLAGS = ("allow",), ("sampling_i",)


@dataclass(slots=True)
class Ended:
    """Sequences whose grammar allows nothing more, and those whose grammar failed, with words."""

    done: list[Sequence] = field(default_factory=list)
    failed: list[tuple[Sequence, str]] = field(default_factory=list)


class Masks:
    """Those of one engine; one thread owns it. `grammars` None: no request may have a grammar."""

    def __init__(self, memory: EngineMemory, vocab: int, grammars: Grammars | None) -> None:
        self._memory, self._vocab, self._grammars = memory, vocab, grammars
        self._makers, self._fillers = _Threads("grammar"), _Threads("masks")
        # By id those whose grammar is made, or whose mask nobody reads before it is there.
        self._under_way: dict[int, Sequence] = {}
        self.bound, self.compiled, self.slow = BOUND, COMPILED, SLOW

    def begin(self, seq: Sequence) -> None:
        """Makes the guide of a sequence that has just come, if its request binds it."""
        spec = seq.request.constraint
        if spec is None:
            return
        seq.guide = Guide(spec, self._vocab, seq.stop_ids, seq.drafts)
        if spec.grammar and self._grammars is not None:
            seq.guide.begin(self._make, self._grammars)
            self._under_way[seq.id] = seq

    def watch(self, seqs: Iterable[Sequence]) -> None:
        """They have lost their slots, and come back when their masks are there."""
        self._under_way |= {s.id: s for s in seqs if s.guide is not None and not s.guide.ready}

    def poll(self, idle: bool) -> Ended:
        """Looks after what is under way; who failed, or took too long. With `idle` it waits a
        little where nothing has changed, since there is nothing else to do."""
        ended = Ended()
        if not self._under_way:
            return ended
        jobs = [seq.guide.job for seq in self._under_way.values() if seq.guide and seq.guide.job]
        if idle and jobs and not any(job.done() for job in jobs):
            wait(jobs, PAUSE, FIRST_COMPLETED)
        late, now = [], time.monotonic()
        for seq in [*self._under_way.values()]:
            guide = seq.guide
            if seq.status is Status.FINISHED or guide is None or guide.ready:
                seq.paused = False  # what its job says, or raises, is read with its mask
                del self._under_way[seq.id]
            elif now - guide.asked > self._most(guide):
                late.append((seq, guide))
        for seq, guide in self._beyond_help(late):
            del self._under_way[seq.id]
            ended.failed.append((seq, _too_long(self._most(guide))))
        return ended

    def _most(self, guide: Guide) -> float:
        return self.bound if guide.made else self.compiled

    def advance(self, seq: Sequence, token: int) -> str:
        """A token of a guided sequence was read, and it goes on: its next mask is asked for. What
        is wrong with the token, "" for nothing."""
        guide = seq.guide
        if guide is None:
            return ""
        try:
            guide.advance(token)
        except InternalError as error:
            return str(error)
        if guide.untold:  # what the job of its beginning says holds until then
            guide.ask(self._fill)
            if seq.paused:
                self._under_way[seq.id] = seq
        return ""

    def waits(self, batch: Batch) -> bool:
        """Whether a mask of the batch depends on tokens that are on their way."""
        needs = (s.guide.need(i) for s, i in batch.bound if s.guide is not None)
        return any(need is Need.TOKENS for need in needs)

    def write(self, batch: Batch, ended: Ended) -> None:
        """Writes the masks of a batch's tokens, all tokens before them having been read. A row of
        one that ends has any mask. Takes at most twice the bound."""
        late = self._write_ready(batch.bound, ended)
        if not late:
            return
        guides = [(seq, seq.guide) for seq, _ in late if seq.guide is not None]
        lost = {seq.id: seq for seq, _ in self._beyond_help(guides)}
        again = self._write_ready([row for row in late if row[0].id not in lost], ended)
        for seq in (*lost.values(), *(seq for seq, _ in again)):
            ended.failed.append((seq, _too_long(self.bound)))

    def _write_ready(
        self, rows: Iterable[tuple[Sequence, int]], ended: Ended
    ) -> list[tuple[Sequence, int]]:
        """Writes masks that are there within the bound; returns the rows of the others."""
        deadline, late = time.monotonic() + self.bound, []
        for seq, index in rows:
            guide = seq.guide
            if guide is None or seq.status is Status.FINISHED:
                continue
            try:
                self._write(seq, guide, index, deadline, ended)
            except TimeoutError:
                late.append((seq, index))
            except Exception as error:  # a grammar's: whatever it is, it is that request's
                ended.failed.append((seq, f"the grammar failed: {error}"))
        return late

    def _write(
        self, seq: Sequence, guide: Guide, index: int, deadline: float, ended: Ended
    ) -> None:
        tables, slot = self._memory.tables, seq.slot
        if guide.need(index) is Need.TOKENS and guide.asks:
            answer = self._read(guide, deadline)
            guide.slow = answer.seconds > self.slow
            if answer.done:
                ended.done.append(seq)
                return
            mask = guide.without_barred(answer.mask)
            seq.paused = guide.slow
        else:
            mask = guide.mask(index)
        if mask is not None:
            tables["allow"][slot] = mask
            self._memory.mark(slot, ALLOW)
        if (mask is not None) != guide.flagged:
            guide.flagged = mask is not None
            tables["sampling_i"][slot, FLAG] = guide.flagged
            self._memory.mark(slot, FLAGS)

    def _read(self, guide: Guide, deadline: float) -> Answer:
        """What the grammar says of the next token. Raises TimeoutError if it says nothing yet."""
        if guide.job is None:
            raise InternalError("no mask was requested of the grammar")
        error = guide.job.exception(max(0.0, deadline - time.monotonic()))
        if error is not None:  # a panic of a library is no Exception, and no more than that
            raise InternalError(str(error)) from error
        return guide.job.result()

    def _beyond_help(self, late: list[tuple[Sequence, Guide]]) -> list[tuple[Sequence, Guide]]:
        """Gives jobs that took too long other threads, where they were never begun, since they
        stood behind others that take too long; returns those others."""
        for threads, made in ((self._makers, False), (self._fillers, True)):
            if any(guide.made == made for _, guide in late):
                threads.abandon()
        begun = []
        for seq, guide in late:
            if guide.job is None or not guide.job.cancel():
                begun.append((seq, guide))
            else:
                guide.again(self._fill if guide.made else self._make)
        return begun

    def _make(self, job: Callable[[], Answer]) -> Future[Answer]:
        return self._makers.submit(job)

    def _fill(self, job: Callable[[], Answer]) -> Future[Answer]:
        return self._fillers.submit(job)

    def close(self) -> None:
        """Ends the threads when what they work on is done. May be called twice."""
        for threads in (self._makers, self._fillers):
            threads.abandon(cancel=True)


class _Threads:
    """A few, made when they are needed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, job: Callable[[], Answer]) -> Future[Answer]:
        """Queues a job."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), self._name)
        return self._pool.submit(job)

    def abandon(self, cancel: bool = False) -> None:
        """Leaves the threads to what they work on, and takes others. `cancel` what was not
        begun."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=cancel)
            self._pool = None


def _too_long(bound: float) -> str:
    return f"the grammar took longer than {bound:g} s to say what may come next"
