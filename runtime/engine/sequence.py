"""`Sequence`: a running request's tokens, its progress, and the slot and pages that it holds.

Plain state with the arithmetic of positions; decides nothing. `scheduler` and `step` alone assign
its fields. A verify round adds between one token and its whole row, and the next round is launched
before it is read: until then the end is known as bounds, `launched - unverified` and `launched`.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from spark_engine.runtime.engine.draft_counts import BySource
from spark_engine.runtime.engine.request import Event, FinishReason, Request, Status
from spark_engine.runtime.engine.rope_offsets import rope_delta
from spark_engine.runtime.engine.token_constraint_state import ConstraintState


@dataclass(slots=True, eq=False)
class Sequence:
    """A submitted request. Times are microseconds of the pacing's clock."""

    id: int  # grows with arrival
    request: Request
    limit: int  # tokens, prompt and generated, at which it ends with LENGTH
    stop_ids: frozenset[int]
    seed: int  # of its random draws
    drafts: int = 0  # most of its rounds
    constraint: ConstraintState | None = None  # restricts its tokens; None: nothing does
    tokens: array[int] = field(init=False)  # i32: the prompt, then what was sampled and collected
    prefill_end: int = field(init=False)  # positions below are prefilled, others decoded one by one
    answer_start: int = field(init=False)  # after the prompt and the forced ids
    rope_delta: int = field(init=False)  # of positions behind its images
    replay_end: int = 0  # tokens below are known: decode rows up to there repeat what was sampled
    launched: int = 0  # positions below this were given to a launched step, at most
    unverified: int = 0  # how many of them a round in flight may still reject
    held_drafts: int = 0  # that its slot holds for its next round
    since: float | None = None  # start of the wait for its next prefill
    arrived: float = 0.0
    tag: float = 0.0  # tokens charged to its owner when its prefill started (`shares`)
    tiles: int = 1  # that it needed on arrival, as far as was known
    drafted: int = 0  # drafts that were verified
    accepted: int = 0  # those of them that became its tokens
    by_source: BySource | None = None  # both by source and position, for a request that asked
    draft_source: str = ""  # of the drafts of its round that is read, for such a request
    cached: int = 0  # tokens of the prompt that the prefix cache had
    last_step: int = -1  # the last launched step that touches its slot or pages
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    finish: FinishReason | None = None
    swap_copy: object | None = None  # of its slot and pages while SWAPPED; opaque here
    swap_bytes: int = 0  # of the swap budget

    def __post_init__(self) -> None:
        self.tokens = array("i", self.request.packed)
        self.prefill_end = self.answer_start = len(self.tokens)
        self.rope_delta = rope_delta(self.request.images)
        if self.request.constraint is not None:
            self.answer_start += len(self.request.constraint.forced)

    def end(self, reason: FinishReason) -> None:
        """Ends it where it has no place in the scheduler yet."""
        self.status, self.finish = Status.FINISHED, reason

    @property
    def rank(self) -> tuple[int, int]:
        """Sorts the most urgent first: higher priority, then earlier arrival."""
        return (-self.request.priority, self.id)

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def content(self) -> array[int]:
        """`tokens`, in which words of an image's digest take turns for its ids: below zero."""
        if not self.request.images:
            return self.tokens
        found = self.tokens[:]
        for image in self.request.images:
            words = np.frombuffer(image.digest, np.int32) | -(1 << 31)
            found[image.start : image.end] = array("i", np.resize(words, image.tokens).tobytes())
        return found

    @property
    def prefilling(self) -> bool:
        return self.launched < self.prefill_end

    @property
    def paused(self) -> bool:
        """True if the next mask is not computed yet and no step waits for it."""
        return self.constraint is not None and self.constraint.paused

    @property
    def decodable(self) -> bool:
        """True if `last_tokens` has the next token and one more may be sampled, even if no
        draft in flight is rejected."""
        return self.prefill_end <= self.launched < self.limit - 1 and not self.paused

    @property
    def unready(self) -> bool:
        """True if the grammar or the next mask is not computed yet, which prevents admission."""
        return self.constraint is not None and not self.constraint.ready

    @property
    def admission_len(self) -> int:
        """Positions that must have pages for it to be admitted: up to its next decode row."""
        known = max(self.prefill_end, self.replay_end, self.launched)
        return min(known + 1, self.limit - 1)

    def forbids_stop(self, position: int) -> bool:
        """True if `min_tokens` forbids ending with a token at `position`, or it is a forced one."""
        return position - self.answer_start < self.request.params.min_tokens

    @property
    def ended_by(self) -> FinishReason | None:
        """The reason to end after its last token, if there is one."""
        last = len(self.tokens) - 1
        if self.tokens[last] in self.stop_ids and not self.forbids_stop(last):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.limit else None

    def last_event(self, reason: FinishReason, message: str = "") -> Event:
        """Its last event, where that has no token."""
        more = self.drafted, self.accepted, self.cached, self.by_source
        return Event(self.id, None, None, (), reason, message, *more)

    def counted(self, position: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens below `position` that its penalties count: of the prompt, and generated."""
        params = self.request.params
        if params.repetition == 1 and not (params.presence or params.frequency):
            return (), ()
        prompt = min(position, self.answer_start)
        known = tuple(self.content[:prompt])
        if self.request.images:
            known = tuple(token for token in known if token >= 0)
        return known, tuple(self.tokens[prompt:position])

    def restart(self, same_bits: bool) -> None:
        """Forgets what was launched: everything known so far becomes prefill, which rounds
        differently; with `same_bits` the prompt alone does, and decode rows repeat the rest."""
        self.launched = self.unverified = self.held_drafts = 0
        if same_bits:
            self.replay_end = len(self.tokens)
        else:
            self.prefill_end = len(self.tokens)
