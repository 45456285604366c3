"""What the prefix cache gives up first, of what may go: nothing is given up here.

Pages that lead to no state save nothing yet and go before all states, by their last use. States go
by what they are worth (`prefix_worth`). Both lie in heaps whose entries may be out of date: that is
seen when they are taken out.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from itertools import count

from spark_engine.runtime.engine.pool import Pool
from spark_engine.runtime.engine.prefix_trie import CachedState, Node
from spark_engine.runtime.engine.prefix_worth import Worth

ByWorth = list[tuple[float, int, CachedState]]  # a heap


class EvictionOrder:
    """Of one cache's nodes without the root, and states, which the cache adds and takes out."""

    def __init__(
        self,
        pages: Pool,
        worths: Worth,
        nodes: Collection[Node],
        states: Collection[CachedState],
    ) -> None:
        self.worths = worths
        self._pages, self._nodes, self._states = pages, nodes, states
        self._heap: ByWorth = []
        self._leaves: list[tuple[float, int, Node]] = []  # bare ones, by last use
        self._used_leaves: set[Node] = set()  # taken from there, since somebody used their pages
        self._tick = count()  # in the heaps nothing but numbers is compared

    def add_state(self, state: CachedState) -> None:
        """By what it is worth now; what was added before is passed when it is taken out."""
        if len(self._heap) > 64 + 4 * len(self._states):
            self._heap = [entry for entry in self._heap if entry[2].alive]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (self.worths.of_state(state), next(self._tick), state))

    def add_leaf(self, node: Node) -> None:
        """Nothing hangs on it any more, or nobody uses its page; one that is not bare is passed."""
        if node.alive and node.bare and node.parent is not None:
            if len(self._leaves) > 64 + 4 * len(self._nodes):
                self._leaves.clear()  # the same ones again and again
                for one in [n for n in self._nodes if n.bare]:
                    heapq.heappush(self._leaves, (one.used, next(self._tick), one))
            heapq.heappush(self._leaves, (node.used, next(self._tick), node))

    def discard(self, node: Node) -> None:
        """It is in the trie no more."""
        self._used_leaves.discard(node)

    def pop_state(self) -> CachedState | None:
        """The state that is worth least, of those whose row nobody is to write or read."""
        pinned, found = [], None
        while self._heap and found is None:
            worth, _, state = heapq.heappop(self._heap)
            if not state.alive:
                continue
            state.since = state.find_since()
            if state.pins:
                pinned.append(state)
            elif self.worths.of_state(state) > worth:  # used since, or those before it are gone
                self.add_state(state)
            else:
                found = state
        for state in pinned:
            self.add_state(state)
        return found

    def pop_leaf(self) -> Node | None:
        """The bare node that was used longest ago, of those whose page nobody uses."""
        while self._leaves or self._find_leaves():
            used, _, node = heapq.heappop(self._leaves)
            if not (node.alive and node.bare):
                continue  # it comes again when nothing hangs on it
            if self._pages.users(node.page):
                self._used_leaves.add(node)
                continue
            if node.used <= used:
                return node
            self.add_leaf(node)
        return None

    def _find_leaves(self) -> bool:
        """Whether there are any among those whose pages were in use."""
        users = self._pages.users
        over = [n for n in self._used_leaves if not (n.alive and n.bare and users(n.page))]
        self._used_leaves.difference_update(over)
        for node in over:
            self.add_leaf(node)
        return bool(self._leaves)

    def push_ends(self, heap: ByWorth, states: Iterable[CachedState]) -> None:
        """Those of the states behind which nothing is kept, by what they are worth."""
        users = self._pages.users
        for s in states:
            bare = not (s.node.parent is None or s.node.children or users(s.node.page))
            if bare or (s.tail and not users(s.page)):
                heapq.heappush(heap, (self.worths.of_state(s), next(self._tick), s))
