"""Which ids one sequence's next token may have: forced ones, a thought and its budget, a grammar.

In this order: the ids that the request forces; a thought, whose end is forced when its budget is
used up; then the answer, which the grammar binds, if there is one. Where that stands costs nothing
and follows each token. What the grammar says is a job for another thread, one at a time. Barred
rows count wherever no id is forced.

Knows positions and ids; no scheduler and no table.
"""

from __future__ import annotations

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

Submit: TypeAlias = Callable[[Callable[[], "Answer"]], "Future[Answer]"]


class Need(enum.Enum):
    """What is known of a token's mask before the tokens that are on their way were read."""

    NOTHING = "all ids are allowed, whatever those will be"
    KNOWN = "its id is forced"
    TOKENS = "it depends on them"


class Part(enum.Enum):
    """Where a sequence stands."""

    FORCED = "the ids that the request forces"
    THOUGHT = "a thought"
    CLOSE = "the ids that close it, its budget being used up"
    ANSWER = "the answer"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a grammar says of the next token: its mask, None for all ids; `done`: there is none.
    `seconds` that it took."""

    mask: Words | None
    done: bool
    seconds: float


class Guide:
    """One sequence's. `drafts` are those of its rounds where nothing binds it.

    `forbidden` ids, and those of calls, must not end its thought where a grammar waits behind it,
    but for its own mark. A mask has ceil(vocab / 32) words.
    """

    def __init__(
        self, spec: ConstraintSpec, vocab: int, forbidden: Iterable[int] = (), drafts: int = 0
    ) -> None:
        self.spec, self.drafts = spec, drafts
        self.flagged = False  # its slot's mask counts in the tables
        self.slow = False  # its grammar takes longer than a step
        self.made = False  # its grammar was; what is under way is a mask alone
        self.job: Future[Answer] | None = None  # the mask of the next token
        self.asked = 0.0  # when, in seconds
        self._vocab, self._words = vocab, -(-vocab // MASK_BITS)
        self._forbidden = sorted({*forbidden, *spec.calls} - {spec.end_of_thought})
        self._inner: Constraint | None = None
        self._grammars: Grammars | None = None
        self._heard: list[int] = []  # tokens that the grammar hears of in the job
        self._told: list[int] = []  # tokens of the answer that the grammar has not heard of
        self._said: tuple[int, ...] = ()  # the last tokens, as many as a barred row may need
        self._ends = _ends(spec.barred)
        self._sizes = sorted({len(beginning) for beginning in self._ends})
        self._reach = max(self._sizes, default=0)
        self.taken = 0  # tokens so far
        self._thought = 0  # of them in the thought
        self._closed = 0  # of `close`
        self._part = Part.FORCED
        self._go_on()

    @property
    def part(self) -> Part:
        """Where it stands."""
        return self._part

    def _go_on(self) -> None:
        """Leaves what is over."""
        spec = self.spec
        if self._part is Part.FORCED and self.taken >= len(spec.forced):
            self._part = Part.THOUGHT if spec.end_of_thought >= 0 else Part.ANSWER
        if self._part is Part.THOUGHT and spec.budget is not None and self._thought >= spec.budget:
            self._part = Part.CLOSE
        if self._part is Part.CLOSE and self._closed >= len(spec.close):
            self._part = Part.ANSWER

    def advance(self, token: int) -> None:
        """A token was sampled. Raises InternalError where another one was forced."""
        part, spec = self._part, self.spec
        wanted = self._forced_id()
        if wanted is not None and token != wanted:
            raise InternalError(f"token {token} was sampled where {wanted} was forced")
        if self._reach and part is not Part.FORCED:
            self._said = (*self._said, token)[-self._reach :]
        self.taken += 1
        self._thought += part is Part.THOUGHT
        self._closed += part is Part.CLOSE
        if part is Part.THOUGHT and (token == spec.end_of_thought or token in spec.calls):
            self._part = Part.ANSWER
        elif part is Part.ANSWER and spec.grammar:
            self._told.append(token)
        self._go_on()

    def need(self, index: int) -> Need:
        """Of the mask of the token generated as number `index`, from 0, or of one before it that
        was not read yet."""
        spec = self.spec
        if index < len(spec.forced):
            return Need.KNOWN
        if spec.grammar or self._reach:
            return Need.TOKENS
        free = self._need_of_thought(index)
        return Need.KNOWN if spec.barred and free is Need.NOTHING else free

    def _need_of_thought(self, index: int) -> Need:
        spec = self.spec
        if self._part is Part.ANSWER or spec.budget is None or spec.end_of_thought < 0:
            return Need.NOTHING
        free = index < len(spec.forced) + spec.budget
        return Need.NOTHING if free else Need.TOKENS

    def binds(self, first: int, last: int) -> bool:
        """Whether anything may bind a token of these numbers, so that none of them is a draft."""
        return any(self.need(index) is not Need.NOTHING for index in (first, last))

    # Masks.

    def mask(self, index: int) -> Words | None:
        """Of the token of that number, where no grammar is asked; None: all ids are allowed.

        Unless its need says otherwise, the tokens before it were read: it is the next one.
        """
        if index < len(self.spec.forced):
            return self._only(self.spec.forced[index])
        need = self.need(index)
        if need is Need.NOTHING:
            return None
        # what is known of a free token holds for whichever comes, not for the next
        wanted = self._forced_id() if need is Need.TOKENS else None
        if wanted is not None:
            return self._only(wanted)
        ids = self._barred()
        if self._part is Part.THOUGHT and self.spec.grammar:
            ids += self._forbidden
        return self._all_but(ids) if ids else None

    def without_barred(self, mask: Words | None) -> Words | None:
        """The grammar's mask of the next token, all tokens before it having been read, without the
        ids that are barred there. Raises RequestError where nothing is left."""
        ids = self._barred()
        if not ids:
            return mask
        left = self._all_but(ids)
        if mask is not None:
            left &= mask
        if not self._within(left).any():
            raise RequestError("every token that its form allows here is banned")
        return left

    def _barred(self) -> list[int]:
        """Ids that would end a row here."""
        said, ends = self._said, self._ends
        begun = (said[len(said) - size :] for size in self._sizes if size <= len(said))
        return [i for beginning in begun for i in ends.get(beginning, ())]

    @property
    def asks(self) -> bool:
        """Whether the next token's mask is a job for another thread."""
        return self._part is Part.ANSWER and bool(self.spec.grammar)

    @property
    def untold(self) -> bool:
        """Whether the grammar has not heard of all tokens of the answer."""
        return bool(self._told)

    def begin(self, submit: Submit, grammars: Grammars) -> None:
        """Makes its grammar by a job, which also gives the first mask of the answer."""
        if self.spec.grammar:
            self._grammars = grammars
            self.again(submit)

    @property
    def ready(self) -> bool:
        """No job is under way."""
        return self.job is None or self.job.done()

    def ask(self, submit: Submit) -> None:
        """Submits the job of the next token's mask. The one before must have been read."""
        self._heard, self._told, self.made = self._told, [], True
        self.again(submit)

    def again(self, submit: Submit) -> None:
        """Submits the same job, which was never begun."""
        self.asked, self.job = time.monotonic(), submit(self._do)

    def _do(self) -> Answer:
        if self._inner is None:
            if self._grammars is None:
                raise InternalError("the grammar could not be compiled")
            self._inner = self._grammars(self.spec.grammar)
        return self._answer(self._inner, self._heard)

    def _answer(self, inner: Constraint, told: list[int]) -> Answer:
        start = time.perf_counter()
        for token in told:
            inner.advance(token)
        if inner.done:
            return Answer(None, True, time.perf_counter() - start)
        mask = np.zeros(self._words, np.uint32)
        if not inner.fill(mask):
            return Answer(None, False, time.perf_counter() - start)
        if not self._within(mask).any():
            raise InternalError("the grammar allows no token and is not done")
        return Answer(mask, False, time.perf_counter() - start)

    def _within(self, mask: Words) -> Words:
        """Without bits of ids that are not there."""
        over = self._words * MASK_BITS - self._vocab
        if over:
            mask[-1] &= np.uint32(0xFFFFFFFF >> over)
        return mask

    def _forced_id(self) -> int | None:
        if self._part is Part.FORCED:
            return self.spec.forced[self.taken]
        return self.spec.close[self._closed] if self._part is Part.CLOSE else None

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
    """The last ids of rows by what stands before them, so that a token asks for what was said and
    not for every row."""
    ends: dict[tuple[int, ...], list[int]] = {}
    for *beginning, last in rows:
        ends.setdefault(tuple(beginning), []).append(last)
    return ends
