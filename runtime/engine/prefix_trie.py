"""The trie of the prefix cache: full pages of tokens, and the states at and between their ends.

Plain values and how they hang together; what is kept and what is given up is `prefix_cache`'s
business.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Node:
    """A full page of tokens after its parent's; a root has none.

    Attributes:
        name: its tokens, which name it among its parent's children.
        end: tokens up to the end of its page.
        page: what holds their keys and values.
        maker: the sequence that computed it.
        used: when it was last made or begun with, in seconds.
        snapshot: what the recurrent layers remember at its end.
        tails: the same at positions inside the page after it.
        alive: it is in the trie.
    """

    name: bytes
    parent: Node | None
    end: int
    page: int
    maker: int
    used: float = 0.0
    children: dict[bytes, Node] = field(default_factory=dict)
    snapshot: CachedState | None = None
    tails: list[CachedState] = field(default_factory=list)
    alive: bool = True

    @property
    def bare(self) -> bool:
        """Nothing hangs on it."""
        return not (self.children or self.snapshot or self.tails)

    @property
    def states(self) -> list[CachedState]:
        """All that hang on it."""
        return [*self.tails] if self.snapshot is None else [self.snapshot, *self.tails]

    def state_for(self, tokens: Sequence[int], most: int, size: int) -> CachedState | None:
        """The deepest of them at `most` or before that `tokens` go through, which begin with the
        node's path, `most` being behind it; pages are of `size` tokens."""
        best = self.snapshot
        if self.tails:
            after = tuple(tokens[self.end : min(self.end + size, most)])
            for state in self.tails:
                deeper = best is None or state.position > best.position
                if deeper and after[: len(state.tail)] == state.tail:
                    best = state
        return best

    def path(self) -> Iterator[Node]:
        """The node and all above it, up to the root."""
        at: Node | None = self
        while at is not None:
            yield at
            at = at.parent


@dataclass(slots=True, eq=False)
class CachedState:
    """A row of the states of unit "sequence", as they were after the token before `position`.

    Attributes:
        tail: the tokens from the node's end to `position`; none at the node's end.
        page: the page whose first rows hold their keys and values; -1 without a tail.
        pins: who is still to write or read the row.
        since: the position of the state before it on its path that stays; what is between would be
            computed again without it.
        before: what its sequence left before it, or went on from.
        heir: what was left next by its sequence, or by the first one that went on from it.
        twin: of a state behind an answer, the one before that.
        done: a later request of its conversation went on from it, or from the one behind its
            answer.
    """

    node: Node
    position: int
    tail: tuple[int, ...]
    page: int
    maker: int
    used: float
    row: int = -1
    since: int = 0
    hits: int = 0
    pins: int = 0
    alive: bool = True
    before: CachedState | None = None
    heir: CachedState | None = None
    twin: CachedState | None = None
    done: bool = False

    @property
    def passed(self) -> bool:
        """Its conversation goes on from a later one: this one is for others."""
        return self.done and self.heir is not None and self.heir.alive

    @property
    def stays(self) -> bool:
        """It is not among the first to go."""
        return self.hits > 0 or not self.passed

    def is_left_by(self, later: Node) -> bool:
        """Whether a state at `later`, made by who went on from this one, is the next of the same
        conversation. The first is; another is one that goes the way of the first."""
        if self.heir is None:
            return True
        first = self.heir.node
        while later.parent is not None and later.end > first.end:
            later = later.parent
        while later is not first:  # one of them was given up and made again
            if later.parent is None or first.parent is None or later.name != first.name:
                return False
            later, first = later.parent, first.parent
        return True

    def follow(self, lineage: Lineage) -> Iterator[CachedState]:
        """Is the next of its lineage. Yields those that are worth less now."""
        self.before = before = lineage.before
        if before is None:
            return
        if lineage.answer and not lineage.begun:
            self.twin = before
        elif before.is_left_by(self.node):
            before.heir = self
            if lineage.begun:  # the use moves on, also from one that was given up meanwhile
                before.hits, self.hits, before.done = max(0, before.hits - 1), 1, True
                if before.twin is not None:
                    before.twin.heir, before.twin.done = self, True
                yield from (s for s in (before, before.twin) if s is not None and s.alive)

    def refuse(self) -> None:
        """It is not kept: who stands before it is its conversation's latest as before."""
        before = self.before
        if before is not None and before.heir is self:
            before.hits, before.heir = before.hits + self.hits, None

    def gain_of_next(self, maker: int, end: int) -> tuple[float, float]:
        """Tokens that a state at `end`, of who went on from this one, will save, and how often."""
        first = self.heir is None or self.heir.maker == maker
        return (end - self.since, 2.0) if first else (end - self.position, 1.0)

    def unlink(self) -> None:
        """It is given up: nobody holds on to it for long."""
        if self.heir is not None and self.heir.before is self:
            self.heir.before = self.before
        self.heir = self.twin = None

    def find_since(self) -> int:
        """Looks for the state before it on its path, but for those that only led up to it."""
        while self.before is not None and not self.before.alive:
            self.before = self.before.before
        at = self.before
        while at is not None and not (at.alive and at.stays):
            at = at.before
        last = 0 if at is None else at.position
        node: Node | None = self.node
        while node is not None and node.end > last:  # hundreds, of a long conversation
            state = node.snapshot
            if state is not None and state.position < self.position and state.stays:
                return state.position
            node = node.parent
        return last


@dataclass(frozen=True, slots=True)
class Lineage:
    """How a new state follows an earlier one of its conversation.

    Attributes:
        before: what its maker left last, or, where it has `begun` there, went on from.
        begun: `before` is another request's, from which the maker went on.
        answer: it is behind the answer.
        awaited: so many requests wait to begin there.
    """

    before: CachedState | None = None
    begun: bool = False
    answer: bool = False
    awaited: int = 0


UNRELATED = Lineage()


@dataclass(frozen=True, slots=True)
class Hit:
    """What a prompt can begin with.

    Attributes:
        position: tokens that need not be computed.
        nodes: those of the full pages below it.
        snapshot: what to go on from; None at position 0.
        tail_page: the page whose rows up to `position` are to be copied; -1 when it is a full
            page's end.
        kv_position: as far as its keys and values are known.
    """

    position: int
    nodes: tuple[Node, ...]
    snapshot: CachedState | None
    tail_page: int
    kv_position: int

    @property
    def pages(self) -> list[int]:
        """The full pages in their order."""
        return [node.page for node in self.nodes]

    @property
    def held_pages(self) -> list[int]:
        """Those, and the one that is to be copied."""
        return self.pages if self.tail_page < 0 else [*self.pages, self.tail_page]


def page_names(
    tokens: array[int], size: int, known: Sequence[bytes] = (), end: int | None = None
) -> list[bytes]:
    """The names of all full pages of `tokens`, up to `end`, of which the first are `known`."""
    begin = len(known) * size
    end = (len(tokens) if end is None else end) // size * size
    words, step = tokens[begin:end].tobytes(), size * tokens.itemsize
    return [*known, *(words[at : at + step] for at in range(0, len(words), step))]
