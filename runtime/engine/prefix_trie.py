"""The trie of the prefix cache: full pages of tokens, and the states at and between their ends.

Plain values and how they hang together; what is kept and what is given up is `prefix_cache`'s
business.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_SALT = os.urandom(32)  # nobody outside can look for prompts whose names are equal


@dataclass(slots=True, eq=False)
class Node:
    """A full page of tokens after its parent's; the root has none.

    Attributes:
        name: a digest of its parent's name and its tokens.
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
    children: set[Node] = field(default_factory=set)
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
        since: the position of the state before it on its path; what is between would be computed
            again without it.
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

    def find_since(self) -> int:
        """Looks for the state before it on its path."""
        for node in self.node.path():
            state = node.snapshot
            if state is not None and state.position < self.position:
                return state.position
        return 0


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
    tokens: Sequence[int], size: int, known: Sequence[bytes] = (), end: int | None = None
) -> list[bytes]:
    """The names of all full pages of `tokens`, up to `end`, of which the first are `known`."""
    names = list(known)
    begin = len(names) * size
    end = (len(tokens) if end is None else end) // size * size
    words = struct.pack(f"{end - begin}i", *tokens[begin:end])
    name, step = names[-1] if names else _SALT, size * struct.calcsize("i")
    for at in range(0, len(words), step):
        name = hashlib.sha256(name + words[at : at + step]).digest()
        names.append(name)
    return names
