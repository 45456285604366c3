"""The order in which the prefix cache evicts: nothing is evicted here.

Pages without a state below them save nothing yet and precede all states, by their last use. States
follow by `eviction_score`. Heaps hold both; stale entries are detected when they are popped.
"""

import heapq
from collections.abc import Collection, Iterable
from itertools import count

from spark_engine.runtime.engine.policy.eviction_score import EvictionScore
from spark_engine.runtime.engine.policy.prefix_trie import CachedState, PageNode
from spark_engine.runtime.engine.pool import Pool

ByScore = list[tuple[float, int, CachedState]]  # a heap


class EvictionOrder:
    """The order of a cache's states and rootless nodes; the cache adds and removes them."""

    def __init__(
        self,
        pages: Pool,
        scores: EvictionScore,
        nodes: Collection[PageNode],
        states: Collection[CachedState],
    ) -> None:
        self.scores = scores
        self._pages, self._nodes, self._states = pages, nodes, states
        self._heap: ByScore = []
        self._leaves: list[tuple[float, int, PageNode]] = []  # bare ones, by last use
        self._used_leaves: set[PageNode] = (
            set()
        )  # popped from there while a sequence used their pages
        self._tick = count()  # in the heaps nothing but numbers is compared

    def add_state(self, state: CachedState) -> None:
        """Adds a state with its score now; an earlier entry of it becomes stale."""
        if len(self._heap) > 64 + 4 * len(self._states):
            self._heap = [entry for entry in self._heap if entry[2].alive]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (self.scores.of_state(state), next(self._tick), state))

    def add_leaf(self, node: PageNode) -> None:
        """Adds a node that became bare, or with a page that became unused; ignores others."""
        if node.alive and node.bare and node.parent is not None:
            if len(self._leaves) > 64 + 4 * len(self._nodes):
                self._leaves.clear()  # the same ones again and again
                for one in [n for n in self._nodes if n.bare]:
                    heapq.heappush(self._leaves, (one.used, next(self._tick), one))
            heapq.heappush(self._leaves, (node.used, next(self._tick), node))

    def discard(self, node: PageNode) -> None:
        self._used_leaves.discard(node)

    def pop_state(self) -> CachedState | None:
        """The state of the lowest score, unless a launch is to write or read its row."""
        pinned, found = [], None
        while self._heap and found is None:
            score, _, state = heapq.heappop(self._heap)
            if not state.alive:
                continue
            state.covered_from = state.find_covered_from()
            if state.pins:
                pinned.append(state)
            elif self.scores.of_state(state) > score:  # used since, or those before it were evicted
                self.add_state(state)
            else:
                found = state
        for state in pinned:
            self.add_state(state)
        return found

    def pop_leaf(self) -> PageNode | None:
        """The least recently used bare node with a page that no sequence uses."""
        while self._leaves or self._find_leaves():
            used, _, node = heapq.heappop(self._leaves)
            if not (node.alive and node.bare):
                continue  # it is added again when it is bare
            if self._pages.users(node.page):
                self._used_leaves.add(node)
                continue
            if node.used <= used:
                return node
            self.add_leaf(node)
        return None

    def _find_leaves(self) -> bool:
        """Adds leaves with pages that were in use; returns whether there are any leaves."""
        users = self._pages.users
        over = [n for n in self._used_leaves if not (n.alive and n.bare and users(n.page))]
        self._used_leaves.difference_update(over)
        for node in over:
            self.add_leaf(node)
        return bool(self._leaves)

    def push_ends(self, heap: ByScore, states: Iterable[CachedState]) -> None:
        """Adds to `heap` those of the states that nothing in the cache depends on."""
        users = self._pages.users
        for s in states:
            bare = not (s.node.parent is None or s.node.children or users(s.node.page))
            if bare or (s.suffix_tokens and not users(s.page)):
                heapq.heappush(heap, (self.scores.of_state(s), next(self._tick), s))
