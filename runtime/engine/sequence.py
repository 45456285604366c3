"""`Sequence`: a running request's tokens, how far it was launched, and the slot and pages it holds.

Plain state with the arithmetic of positions; decides nothing. A round of drafts adds between one
token and its whole row, and the next is launched before it is read: until then positions are known
as bounds, `launched - slack` and `launched`.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from spark_engine.runtime.engine.guide import Guide
from spark_engine.runtime.engine.prefix_trie import CachedState, Node
from spark_engine.runtime.engine.request import FinishReason, Request, Status


@dataclass(slots=True, eq=False)
class Sequence:
    """A submitted request. `id` grows with arrival.

    Attributes:
        limit: tokens, prompt and generated, at which it ends with LENGTH.
        stop_ids: token ids that end it.
        seed: of its random draws.
        drafts: most drafts of its rounds.
        tokens: i32, the prompt, then what was sampled and collected.
        prefill_end: positions below this are prefilled, the others decoded one by one.
        launched: positions below this were given to a launched step, at most.
        slack: how many of them a round in flight may still reject.
        held: drafts that its slot holds for its next round.
        since: when it began to wait for its next prefill, by the pacing's clock.
        arrived: when it came, by that clock.
        tag: what its owner had been charged when it began (`shares`).
        tiles: of its prompt that it was to compute when it came, as far as was known.
        drafted, accepted: drafts that were verified, and those of them that became its tokens.
        cached: tokens of the prompt that were not computed, since the prefix cache had them.
        lost: tokens behind those whose pages were there, but no state to go on from.
        grid: where its first tile begins; its tiles end at multiples of a tile behind it.
        source: what its first tile goes on from; None once that was launched, and at position 0.
        origin: what it went on from; None at position 0.
        left: the last state that was kept of it.
        points: positions at which its state is to be kept, ascending.
        names: of its full pages, for the prefix cache; of those of its prompt while it runs.
        node: the deepest of its pages that others can begin with.
        leader, leader_end: it waits until this one was launched up to there, to go on from it.
        held_back: it let others pass for that.
        awaited: a position for each that waits for it so, ascending.
        last_step: the last launched step that touches its slot or pages.
        snapshot: the copy of its slot and pages while SWAPPED; opaque here.
        swap_bytes: what the snapshot takes of the swap budget.
        answer_start: where its answer begins: behind the prompt and the ids that are forced.
        guide: what binds its tokens; None: nothing.
        paused: its next mask is not there yet, and no step waits for it.
    """

    id: int
    request: Request
    limit: int
    stop_ids: frozenset[int]
    seed: int
    drafts: int = 0
    tokens: array[int] = field(init=False)
    prefill_end: int = field(init=False)
    launched: int = 0
    slack: int = 0
    held: int = 0
    since: float | None = None
    arrived: float = 0.0
    tag: float = 0.0
    tiles: int = 1
    drafted: int = 0
    accepted: int = 0
    cached: int = 0
    lost: int = 0
    grid: int = 0
    source: CachedState | None = None
    origin: CachedState | None = None
    left: CachedState | None = None
    points: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    node: Node | None = None
    leader: Sequence | None = None
    leader_end: int = 0
    held_back: bool = False
    awaited: list[int] = field(default_factory=list)
    last_step: int = -1
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    finish: FinishReason | None = None
    snapshot: object | None = None
    swap_bytes: int = 0
    answer_start: int = field(init=False)
    guide: Guide | None = None
    paused: bool = False

    def __post_init__(self) -> None:
        self.tokens = array("i", self.request.packed)
        self.prefill_end = self.answer_start = len(self.tokens)
        if self.request.constraint is not None:
            self.answer_start += len(self.request.constraint.forced)

    @property
    def rank(self) -> tuple[int, int]:
        """Sorts the most urgent first: higher priority, then earlier arrival."""
        return (-self.request.priority, self.id)

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def prefilling(self) -> bool:
        """Some positions below `prefill_end` were not launched yet."""
        return self.launched < self.prefill_end

    @property
    def decodable(self) -> bool:
        """Its next token can be fed from `last_tokens`, and one more may be sampled, even if no
        draft in flight is rejected."""
        return self.prefill_end <= self.launched < self.limit - 1 and not self.paused

    @property
    def unready(self) -> bool:
        """Its grammar, or its next mask, is still being made, so that it is not to be admitted."""
        return self.guide is not None and not self.guide.ready

    @property
    def admission_len(self) -> int:
        """Positions that must have pages for it to be admitted: up to its next decode row."""
        return min(max(self.prefill_end, self.launched) + 1, self.limit - 1)

    def forbids_stop(self, position: int) -> bool:
        """Whether `min_tokens` forbids ending with a token at `position`, or it is a forced one."""
        return position - self.answer_start < self.request.params.min_tokens

    def restart(self) -> None:
        """Forgets what was launched: everything known so far becomes prefill."""
        self.launched = self.slack = self.held = self.grid = 0
        self.points, self.node, self.left = [], None, None
        self.prefill_end = len(self.tokens)
