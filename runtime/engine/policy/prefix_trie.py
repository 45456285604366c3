"""The trie of the prefix cache: full pages of tokens, and the states at and between their ends.

Plain values and their links; `prefix_cache` decides what is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class PageNode:
    """A full page of tokens after its parent's; a root has none."""

    name: bytes  # among its parent's children (`page_names`)
    parent: PageNode | None
    end: int  # tokens up to the end of its page
    page: int  # the page with their keys and values
    maker: int  # id of the sequence that computed it
    used: float = 0.0  # seconds: time of creation or of the last hit
    children: dict[bytes, PageNode] = field(default_factory=dict)
    snapshot: CachedState | None = None  # the recurrent layers' state at its end
    suffix_states: list[CachedState] = field(default_factory=list)  # inside the page after it
    alive: bool = True  # it is in the trie
    digest: bytes = b""  # of all on its path, where a file is named after it

    @property
    def bare(self) -> bool:
        return not (self.children or self.snapshot or self.suffix_states)

    @property
    def states(self) -> list[CachedState]:
        at_end = [] if self.snapshot is None else [self.snapshot]
        return [*at_end, *self.suffix_states]

    def state_for(self, tokens: Sequence[int], most: int, size: int) -> CachedState | None:
        """The deepest of its states at `most` or before that is on the path of `tokens`, which
        start with the node's path; `most` is after the node, pages are of `size` tokens."""
        best = self.snapshot
        if self.suffix_states:
            after = tuple(tokens[self.end : min(self.end + size, most)])
            for state in self.suffix_states:
                deeper = best is None or state.position > best.position
                if deeper and after[: len(state.suffix_tokens)] == state.suffix_tokens:
                    best = state
        return best

    def path(self) -> Iterator[PageNode]:
        at: PageNode | None = self
        while at is not None:
            yield at
            at = at.parent


@dataclass(slots=True, eq=False)
class CachedState:
    """A row of the states of unit "sequence", as they were after the token before `position`.

    Attributes:
        suffix_tokens: the tokens from the node's end to `position`; none at the node's end.
        page: the page that starts with their keys and values; -1 without suffix tokens.
        pins: launches that are still to write or read the row.
        covered_from: the position of the protected state before it on its path; without this one
            the tokens in between would be computed again.
        before: the state that its sequence left before it, or resumed from.
        next_in_conversation: the next one of its sequence, or of the first that resumed from it.
        before_answer: of a state after an answer, the one before the answer.
        resumed: a later request of its conversation resumed from it, or from the one after its
            answer.
    """

    node: PageNode
    position: int
    suffix_tokens: tuple[int, ...]
    page: int
    maker: int
    used: float
    row: int = -1
    covered_from: int = 0
    hits: int = 0
    pins: int = 0
    alive: bool = True
    before: CachedState | None = None
    next_in_conversation: CachedState | None = None
    before_answer: CachedState | None = None
    resumed: bool = False

    @property
    def superseded(self) -> bool:
        """True if the conversation resumes from a later state; other prompts may use this one."""
        after = self.next_in_conversation
        return self.resumed and after is not None and after.alive

    @property
    def protected(self) -> bool:
        """True if the state is not among the first to be evicted."""
        return self.hits > 0 or not self.superseded

    def is_followed_by(self, later: PageNode) -> bool:
        """True if a state at `later`, of a sequence that resumed from this one, is the next of the
        conversation: true for the first such state, and for any later one on the same path."""
        if self.next_in_conversation is None:
            return True
        first = self.next_in_conversation.node
        while later.parent is not None and later.end > first.end:
            later = later.parent
        while later is not first:  # one of them was evicted and computed again
            if later.parent is None or first.parent is None or later.name != first.name:
                return False
            later, first = later.parent, first.parent
        return True

    def follow(self, lineage: Lineage) -> Iterator[CachedState]:
        """Links it after its lineage. Yields the states that have a lower score now."""
        self.before = before = lineage.before
        if before is None:
            return
        if lineage.answer and not lineage.resumed:
            self.before_answer = before
        elif before.is_followed_by(self.node):
            before.next_in_conversation = self
            if lineage.resumed:  # the hit moves here, also from a state evicted meanwhile
                before.hits, self.hits, before.resumed = max(0, before.hits - 1), 1, True
                other = before.before_answer
                if other is not None:
                    other.next_in_conversation, other.resumed = self, True
                yield from (s for s in (before, other) if s is not None and s.alive)

    def refuse(self) -> None:
        """Takes back the link and the hit of `follow`: the state is not kept."""
        before = self.before
        if before is not None and before.next_in_conversation is self:
            before.hits, before.next_in_conversation = before.hits + self.hits, None

    def gain_of_next(self, maker: int, end: int) -> tuple[float, float]:
        """Tokens that a state at `end` of sequence `maker`, which resumed here, will save, and how
        often."""
        after = self.next_in_conversation
        first = after is None or after.maker == maker
        return (end - self.covered_from, 2.0) if first else (end - self.position, 1.0)

    def unlink(self) -> None:
        """Removes an evicted state's links, so that it can be freed."""
        after = self.next_in_conversation
        if after is not None and after.before is self:
            after.before = self.before
        self.next_in_conversation = self.before_answer = None

    def find_covered_from(self) -> int:
        """Computes `covered_from`: superseded states without hits do not count."""
        while self.before is not None and not self.before.alive:
            self.before = self.before.before
        at = self.before
        while at is not None and not (at.alive and at.protected):
            at = at.before
        last = 0 if at is None else at.position
        node: PageNode | None = self.node
        while node is not None and node.end > last:  # hundreds, of a long conversation
            state = node.snapshot
            if state is not None and state.position < self.position and state.protected:
                return state.position
            node = node.parent
        return last


@dataclass(frozen=True, slots=True)
class Lineage:
    """How a new state follows an earlier one of its conversation."""

    # The last state that its maker left, or the one that it resumed from.
    before: CachedState | None = None
    resumed: bool = False  # `before` is another request's, from which the maker resumed
    answer: bool = False  # it is after the answer
    waiters: int = 0  # requests that wait to resume there


UNRELATED = Lineage()


@dataclass(frozen=True, slots=True)
class Hit:
    """The cached state from which a prompt can resume."""

    position: int  # tokens that need not be computed
    nodes: tuple[PageNode, ...]  # those of the full pages below it
    snapshot: CachedState | None  # the state there; None at position 0
    suffix_page: int  # the page to copy, up to `position`; -1 at a page's end
    kv_position: int  # number of tokens with known keys and values

    @property
    def pages(self) -> list[int]:
        return [node.page for node in self.nodes]

    @property
    def held_pages(self) -> list[int]:
        return self.pages if self.suffix_page < 0 else [*self.pages, self.suffix_page]
