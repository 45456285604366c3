"""The prefix cache: KV pages of computed prefixes, and recurrent states to resume from.

A trie of full pages (`prefix_trie`) for each salt: prompts of different salts share nothing, even
where their tokens are equal. States of the recurrent layers (rows of unit "sequence") are kept at
some positions only: at a node's end, or after it together with the suffix tokens in between and the
page that starts with them. A prompt resumes from the deepest such state.

Knows pages and rows by number, tokens by value, and no array: the engine copies. Pages and rows are
charged to one budget of bytes; `prefix_eviction` gives the order of eviction.
"""

import heapq
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spark_engine.errors import InternalError
from spark_engine.runtime.engine.policy.page_names import page_name
from spark_engine.runtime.engine.policy.prefix_eviction import (
    HYSTERESIS,
    ByScore,
    EvictionOrder,
    EvictionScore,
)
from spark_engine.runtime.engine.policy.prefix_trie import (
    UNRELATED,
    CachedState,
    Hit,
    Lineage,
    PageNode,
)
from spark_engine.runtime.engine.pool import Pool


@dataclass
class CacheCounts:
    """Evictions since the start."""

    evicted_pages: int = 0
    evicted_snapshots: int = 0


class PrefixCache:
    """The trie over the engine's pages, and the rows of its states.

    `rows` are numbered from 0. `budget`, `page_bytes` and `row_bytes` in bytes; `clock` in seconds.
    """

    def __init__(
        self,
        pages: Pool,
        rows: Pool,
        page_size: int,
        page_bytes: int,
        row_bytes: int,
        budget: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.budget = budget
        self.counts = CacheCounts()
        self.version = 0  # grows with every node and state that is added or removed
        self._pages, self._rows = pages, rows
        self._size, self._page_bytes, self._row_bytes = page_size, page_bytes, row_bytes
        self._clock = clock
        self._roots: dict[bytes, PageNode] = {}  # by name, those that are not bare
        self._nodes: set[PageNode] = set()  # all but the roots
        self._states: set[CachedState] = set()
        self._leaving: set[CachedState] = set()  # evicted, but the row is still to be read
        scores = EvictionScore(page_size, page_bytes, row_bytes)
        self._order = EvictionOrder(pages, scores, self._nodes, self._states)

    def match(
        self,
        tokens: Sequence[int],
        names: Sequence[bytes],
        most: int,
        suffixes: bool = True,
        salt: bytes = b"",
    ) -> Hit:
        """The deepest state at `most` or before on the path of `tokens`, under the same salt;
        takes nothing.

        `names`: of the full pages of `tokens`, or of the first of them. Without `suffixes` only
        states at a page's end count.
        """
        nodes = self.path(salt, names[: most // self._size])
        if not nodes:
            return Hit(0, (), None, -1, 0)
        deepest = nodes[-1]
        if not self._row_bytes:  # no layer is recurrent
            return Hit(deepest.end, tuple(nodes[1:]), None, -1, deepest.end)
        for node in reversed(nodes):
            state = node.state_for(tokens, most, self._size) if suffixes else node.snapshot
            if state is not None:
                at, full = state.position, tuple(nodes[1 : 1 + node.end // self._size])
                return Hit(at, full, state, state.page, max(deepest.end, at))
        return Hit(0, (), None, -1, deepest.end)

    def take(self, hit: Hit) -> None:
        """Uses the hit's full pages for a sequence, and pins its row until it is read (`unpin`)."""
        now = self._clock()
        for node in hit.nodes:
            node.used = now
        self._pages.share(hit.pages)
        if hit.snapshot is not None:
            hit.snapshot.used = now
            hit.snapshot.hits += 1
            hit.snapshot.pins += 1

    def unpin(self, state: CachedState) -> None:
        """The launch that was to write or read the row is made, or never will be."""
        state.pins -= 1
        if not state.pins and state in self._leaving:
            self._leaving.remove(state)
            self._rows.give([state.row])

    def extend(
        self,
        node: PageNode | None,
        names: Sequence[bytes],
        pages: Sequence[int],
        maker: int,
        gain: tuple[float, float] = (0.0, 1.0),
        salt: bytes = b"",
    ) -> PageNode:
        """Adds nodes for the full pages named `names`, those beyond `node` (None: from the salt's
        root), and returns the deepest; fewer where pages and states of a higher score fill the
        budget. `gain`: tokens that the state after them will save, and how often."""
        if node is None or not node.alive or node.parent is None:
            node = self.root_of(salt)
        score = self._order.scores.of_page(*gain, self._clock())
        for index in range(node.end // self._size, len(names)):
            page, child = pages[index], node.children.get(names[index])
            if child is None:
                if not self._make_space(self._page_bytes, score):
                    break
                if not node.alive and node.parent is not None:
                    break
                child = PageNode(
                    names[index], node, node.end + self._size, page, maker, self._clock()
                )
                node.children[child.name] = child
                self._keep_root(node)
                self._nodes.add(child)
                self.version += 1
                self._pages.keep(page)
            elif child.page != page and self._is_only_kept_here(child.page):
                self._pages.keep(page)  # one page for the same tokens is enough
                self._pages.drop(child.page)
                child.page, child.maker = page, maker
            node = child
        return node

    def save(
        self,
        node: PageNode,
        suffix: Sequence[int],
        page: int,
        maker: int,
        lineage: Lineage = UNRELATED,
    ) -> CachedState | None:
        """A row for the state after a node and the `suffix` tokens; their keys and values are in
        `page`.

        It is pinned until it was written (`unpin`). None where there is one already, and where
        those that are kept have a higher score.
        """
        after, now = tuple(suffix), self._clock()
        node = self._root(node.name) if node.parent is None else node
        for known in node.states:
            if known.suffix_tokens == after:
                known.used = now
                return None
        if not node.alive:
            return None
        page = page if after else -1
        state = CachedState(node, node.end + len(after), after, page, maker, now)
        for lesser in state.follow(lineage):
            self._order.add_state(lesser)
        state.covered_from = state.find_covered_from()
        own = self._page_bytes if after and not self._pages.keeps(page) else 0
        self._attach(state)  # so that its node is not evicted for it
        score = self._order.scores.of_state(state) + math.log(1 + lineage.waiters)
        if not self._make_space(self._row_bytes + own, score, row=True):
            self._detach(state)
            state.refuse()
            return None
        state.row, state.pins = self._rows.take()[0], 1
        if after:
            self._pages.keep(page)
        self._states.add(state)
        self.version += 1
        self._order.add_state(state)
        return state

    def reclaim(self, pages: int) -> bool:
        """Evicts until `pages` pages are free; False where unused pages do not suffice."""
        ends: ByScore | None = None  # filled when needed
        while self._pages.free < pages and self._pages.spare:
            leaf = self._order.pop_leaf()
            if leaf is not None:
                self._drop_node(leaf)
                if ends is not None and leaf.parent is not None:
                    self._order.push_ends(ends, leaf.parent.states)
                continue
            if ends is None:
                ends = []
                self._order.push_ends(ends, self._states)
            if ends:
                state = heapq.heappop(ends)[2]
                if state.alive:
                    self._drop_state(state)
                continue
            # Below these are pages that a sequence computed again and uses.
            for node in [n for n in self._nodes if not self._pages.users(n.page)]:
                if node.alive:
                    self._drop_subtree(node)
        return self._pages.free >= pages

    def released(self, node: PageNode | None) -> None:
        """A sequence with this deepest node no longer uses its page."""
        if node is not None:
            self._order.add_leaf(node)

    def forget(
        self,
        node: PageNode | None,
        maker: int,
        origin: CachedState | None = None,
        salt: bytes = b"",
    ) -> None:
        """Drops all that `maker` computed on the path to `node`, and what depends on it; also
        `origin`, the state that it resumed from, since it may be wrong too."""
        path = list(node.path()) if node is not None and node.alive else self.path(salt, ())
        for state in [s for one in path for s in one.states if s.maker == maker]:
            self._drop_state(state)
        if origin is not None and origin.alive:
            self._drop_state(origin)
        own = [one for one in path if one.maker == maker]
        if own:
            self._drop_subtree(own[-1])

    def clear(self) -> None:
        """Frees every page and row; those in use when they no longer are."""
        for root in tuple(self._roots.values()):
            for child in tuple(root.children.values()):
                self._drop_subtree(child)
            for state in root.states:
                self._drop_state(state)

    @property
    def used_bytes(self) -> int:
        return self._pages.kept * self._page_bytes + len(self._states) * self._row_bytes

    @property
    def snapshots(self) -> int:
        return len(self._states)

    def root_of(self, salt: bytes) -> PageNode:
        """The parent of a salt's first pages; it is kept while it is not bare."""
        return self._root(page_name(b"", salt))

    def path(self, salt: bytes, names: Sequence[bytes]) -> list[PageNode]:
        """The salt's root and the nodes of the pages with these names, as far as they exist."""
        root = self._roots.get(page_name(b"", salt))
        if root is None:
            return []
        found = [root]
        for name in names:
            child = found[-1].children.get(name)
            if child is None:
                break
            found.append(child)
        return found

    def _root(self, name: bytes) -> PageNode:
        return self._roots.get(name) or PageNode(name, None, 0, -1, -1)

    def _keep_root(self, node: PageNode) -> None:
        """The node is not bare any more: if it is a root, it is kept."""
        if node.parent is None:
            node.alive, self._roots[node.name] = True, node

    def _let_go(self, node: PageNode) -> None:
        """The node may be bare now: a bare root is not kept."""
        if node.parent is None and node.bare:
            node.alive = False
            self._roots.pop(node.name, None)
        self._order.add_leaf(node)

    def _make_space(self, size: int, score: float, row: bool = False) -> bool:
        """Evicts what has a lower score than `score` until `size` bytes, and a row, are free."""
        while self.used_bytes + size > self.budget or (row and not self._rows.free):
            leaf = self._order.pop_leaf() if self.used_bytes + size > self.budget else None
            if leaf is not None:
                self._drop_node(leaf)
                continue
            state = self._order.pop_state()
            if state is None:
                return False
            if self._order.scores.of_state(state) > score - HYSTERESIS:
                self._order.add_state(state)
                return False
            self._drop_state(state)
        return True

    def _is_only_kept_here(self, page: int) -> bool:
        """True if a node's page would be free without the node."""
        return not self._pages.users(page) and self._pages.keeps(page) == 1

    def _attach(self, state: CachedState) -> None:
        if state.suffix_tokens:
            state.node.suffix_states.append(state)
        else:
            state.node.snapshot = state
        self._keep_root(state.node)

    def _detach(self, state: CachedState) -> None:
        state.alive = False
        if state.suffix_tokens:
            state.node.suffix_states.remove(state)
        else:
            state.node.snapshot = None
        self._let_go(state.node)

    def _drop_state(self, state: CachedState) -> None:
        self._detach(state)
        self._states.remove(state)
        state.unlink()
        self.version += 1
        if state.suffix_tokens:
            self._pages.drop(state.page)
        if state.pins:
            self._leaving.add(state)
        else:
            self._rows.give([state.row])
        self.counts.evicted_snapshots += 1

    def _drop_node(self, node: PageNode) -> None:
        if node.parent is None:
            raise InternalError("the root of the prefix cache holds no page")
        node.alive = False
        del node.parent.children[node.name]
        self._nodes.remove(node)
        self._order.discard(node)
        self.version += 1
        self._pages.drop(node.page)
        self.counts.evicted_pages += 1
        self._let_go(node.parent)

    def _drop_subtree(self, top: PageNode) -> None:
        below = [top]
        for node in below:
            below += node.children.values()
        for node in reversed(below):
            for state in node.states:
                self._drop_state(state)
            self._drop_node(node)
