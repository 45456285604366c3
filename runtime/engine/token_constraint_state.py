"""The ids that one sequence's next token may have: forced ones, a thought's budget, a grammar.

In this order: the ids that the request forces; a thought, with an end forced when its budget is
used up; then the answer, which the grammar restricts, if there is one. The phase is updated on
every token, which is cheap; grammar masks are jobs of other threads, one at a time. Barred rows
count wherever no id is forced.

Knows positions and ids; no scheduler and no table.
"""

import enum
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from spark_engine.errors import InternalError, RequestError
from spark_engine.interface import MASK_BITS
from spark_engine.runtime.engine.constraint import Constraint, ConstraintSpec, Grammars, Words

Submit: TypeAlias = Callable[[Callable[[], "MaskResult"]], "Future[MaskResult]"]


class MaskDependency(enum.Enum):
    """What a token's mask depends on, before the tokens in flight were read."""

    NOTHING = "all ids are allowed, whatever those will be"
    KNOWN = "its id is forced"
    TOKENS = "it depends on them"


class Phase(enum.Enum):
    """The part of its output that a sequence has reached."""

    FORCED = "the ids that the request forces"
    THOUGHT = "a thought"
    CLOSE = "the ids that close it, its budget being used up"
    ANSWER = "the answer"


@dataclass(frozen=True, slots=True)
class MaskResult:
    """A grammar's result for the next token: its mask, None for all ids; `done`: no token can
    follow. `seconds`: duration."""

    mask: Words | None
    done: bool
    seconds: float


class ConstraintState:
    """The constraint state of a sequence. A mask has ceil(vocab / 32) words.

    `drafts`: most drafts of a round where nothing restricts its tokens. `forbidden` ids, and those
    of calls, must not end its thought where a grammar follows, except its own mark.

    Attributes:
        flagged: the mask in its slot's table row is in effect.
        slow: its grammar takes longer than a step.
        paused: its next mask is not computed yet, and no step waits for it.
        compiled: its grammar is; the job in progress is a mask alone.
        job: the mask of the next token.
        asked: time of the job's submission, seconds.
        taken: tokens so far.
    """

    def __init__(
        self, spec: ConstraintSpec, vocab: int, forbidden: Iterable[int] = (), drafts: int = 0
    ) -> None:
        self.spec, self.drafts = spec, drafts
        self.flagged = self.slow = self.paused = self.compiled = False
        self.job: Future[MaskResult] | None = None
        self.asked = 0.0
        self.taken = 0
        self._vocab, self._words = vocab, -(-vocab // MASK_BITS)
        self._forbidden = sorted({*forbidden, *spec.calls} - {spec.end_of_thought})
        self._inner: Constraint | None = None
        self._grammars: Grammars | None = None
        self._submitted: list[int] = []  # tokens that the job passes to the grammar
        self._pending: list[int] = []  # tokens of the answer that no job has
        self._recent: tuple[int, ...] = ()  # the last tokens, as many as a barred row may need
        self._ends = _ends(spec.barred)
        self._sizes = sorted({len(prefix) for prefix in self._ends})
        self._reach = max(self._sizes, default=0)
        self._thought = 0  # tokens of the thought
        self._closed = 0  # tokens of `close`
        self._phase = Phase.FORCED
        self._leave_finished_phases()

    @property
    def phase(self) -> Phase:
        return self._phase

    def _leave_finished_phases(self) -> None:
        spec = self.spec
        if self._phase is Phase.FORCED and self.taken >= len(spec.forced):
            self._phase = Phase.THOUGHT if spec.end_of_thought >= 0 else Phase.ANSWER
        if self._phase is Phase.THOUGHT and spec.budget is not None:
            if self._thought >= spec.budget:
                self._phase = Phase.CLOSE
        if self._phase is Phase.CLOSE and self._closed >= len(spec.close):
            self._phase = Phase.ANSWER

    def advance(self, token: int) -> None:
        """Adds a sampled token. Raises InternalError where another one was forced."""
        phase, spec = self._phase, self.spec
        wanted = self._forced_id()
        if wanted is not None and token != wanted:
            raise InternalError(f"token {token} was sampled where {wanted} was forced")
        if self._reach and phase is not Phase.FORCED:
            self._recent = (*self._recent, token)[-self._reach :]
        self.taken += 1
        self._thought += phase is Phase.THOUGHT
        self._closed += phase is Phase.CLOSE
        if phase is Phase.THOUGHT and (token == spec.end_of_thought or token in spec.calls):
            self._phase = Phase.ANSWER
        elif phase is Phase.ANSWER and spec.grammar:
            self._pending.append(token)
        self._leave_finished_phases()

    def dependency(self, index: int) -> MaskDependency:
        """The dependency of the mask of generated token `index` (from 0) or an earlier one."""
        spec = self.spec
        if index < len(spec.forced):
            return MaskDependency.KNOWN
        if spec.grammar or self._reach:
            return MaskDependency.TOKENS
        free = self._dependency_of_thought(index)
        return MaskDependency.KNOWN if spec.barred and free is MaskDependency.NOTHING else free

    def _dependency_of_thought(self, index: int) -> MaskDependency:
        spec = self.spec
        if self._phase is Phase.ANSWER or spec.budget is None or spec.end_of_thought < 0:
            return MaskDependency.NOTHING
        free = index < len(spec.forced) + spec.budget
        return MaskDependency.NOTHING if free else MaskDependency.TOKENS

    def drafts_from(self, first: int, most: int) -> int:
        """Drafts of a round from generated token `first` on, of at most `most` drafts: none where
        anything may restrict one of its tokens."""
        free = (self.dependency(i) is MaskDependency.NOTHING for i in (first, first + most))
        return self.drafts if all(free) else 0

    def mask(self, index: int) -> Words | None:
        """The mask of generated token `index` where no grammar is asked; None: all ids are allowed.

        Where it depends on tokens, all before it were read: it is the next one.
        """
        if index < len(self.spec.forced):
            return self._only(self.spec.forced[index])
        dependency = self.dependency(index)
        if dependency is MaskDependency.NOTHING:
            return None
        # what is known of a free token applies to whichever comes, not only to the next
        wanted = self._forced_id() if dependency is MaskDependency.TOKENS else None
        if wanted is not None:
            return self._only(wanted)
        ids = self._barred()
        if self._phase is Phase.THOUGHT and self.spec.grammar:
            ids += self._forbidden
        return self._all_but(ids) if ids else None

    def without_barred(self, mask: Words | None) -> Words | None:
        """The grammar's mask of the next token, without the ids that are barred there; all tokens
        before it were read. Raises RequestError where no id is left."""
        ids = self._barred()
        if not ids:
            return mask
        left = self._all_but(ids)
        if mask is not None:
            left &= mask
        if not self._within(left).any():
            raise RequestError("every token that its form allows here is banned: ban fewer")
        return left

    def _barred(self) -> list[int]:
        recent = self._recent
        starts = (recent[len(recent) - size :] for size in self._sizes if size <= len(recent))
        return [i for start in starts for i in self._ends.get(start, ())]

    @property
    def asks(self) -> bool:
        return self._phase is Phase.ANSWER and bool(self.spec.grammar)

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    def compile(self, submit: Submit, grammars: Grammars) -> None:
        """Submits the job that compiles its grammar and computes the answer's first mask."""
        if self.spec.grammar:
            self._grammars = grammars
            self.resubmit(submit)

    @property
    def ready(self) -> bool:
        return self.job is None or self.job.done()

    def ask(self, submit: Submit) -> None:
        """Submits the job of the next token's mask. The one before must have been read."""
        self._submitted, self._pending, self.compiled = self._pending, [], True
        self.resubmit(submit)

    def resubmit(self, submit: Submit) -> None:
        """Submits the same job, which was never started."""
        self.asked, self.job = time.monotonic(), submit(self._run)

    def _run(self) -> MaskResult:
        if self._inner is None:
            if self._grammars is None:
                raise InternalError("the grammar could not be compiled")
            self._inner = self._grammars(self.spec.grammar)
        return self._next_mask(self._inner, self._submitted)

    def _next_mask(self, inner: Constraint, tokens: list[int]) -> MaskResult:
        start = time.perf_counter()
        for token in tokens:
            inner.advance(token)
        if inner.done:
            return MaskResult(None, True, time.perf_counter() - start)
        mask = np.zeros(self._words, np.uint32)
        if not inner.fill(mask):
            return MaskResult(None, False, time.perf_counter() - start)
        if not self._within(mask).any():
            raise InternalError("the grammar allows no token and is not done")
        return MaskResult(mask, False, time.perf_counter() - start)

    def _within(self, mask: Words) -> Words:
        over = self._words * MASK_BITS - self._vocab
        if over:
            mask[-1] &= np.uint32(0xFFFFFFFF >> over)
        return mask

    def _forced_id(self) -> int | None:
        if self._phase is Phase.FORCED:
            return self.spec.forced[self.taken]
        return self.spec.close[self._closed] if self._phase is Phase.CLOSE else None

    def _only(self, token: int) -> Words:
        mask = np.zeros(self._words, np.uint32)
        mask[token // MASK_BITS] = 1 << token % MASK_BITS
        return mask

    def _all_but(self, ids: list[int]) -> Words:
        mask = np.full(self._words, 0xFFFFFFFF, np.uint32)
        word, bit = np.divmod(np.array(ids), MASK_BITS)
        np.bitwise_and.at(mask, word, ~(np.uint32(1) << bit.astype(np.uint32)))
        return mask


def _ends(rows: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], list[int]]:
    """The last ids of rows by the ids before them, so that a token needs one look-up and not one
    of every row."""
    ends: dict[tuple[int, ...], list[int]] = {}
    for *prefix, last in rows:
        ends.setdefault(tuple(prefix), []).append(last)
    return ends
