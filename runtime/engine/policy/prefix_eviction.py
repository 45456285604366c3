"""The order in which the prefix cache evicts: nothing is evicted here.

Pages without a state below them save nothing yet and precede all states, by their last use. States
follow by their score, what a byte of each saves. Heaps hold both; stale entries are detected when
they are popped.

score = log(tokens saved x expected hits / bytes) + last use / TAU. The likelihood of a hit falls
with time without use and grows with use; it falls alike for all, so time alone never changes the
order of two. A superseded state (its conversation resumed from a later one) is kept for others.
"""

import heapq
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import count

from spark_engine.runtime.engine.policy.prefix_trie import CachedState, PageNode
from spark_engine.runtime.engine.pool import Pool

TAU = 600.0  # seconds without use after which a state is worth 1/e
SUPERSEDED_WEIGHT = 0.25  # hits expected of a superseded state
# A new state must exceed the score of what is evicted for it by this much. Without it, of more
# agents than fit, asking in turns, each would find its state evicted by those before it. What was
# not used for TAU * HYSTERESIS seconds is evicted all the same.
HYSTERESIS = 0.2
ByScore = list[tuple[float, int, CachedState]]  # a heap


@dataclass(frozen=True)
class EvictionScore:
    """Scores a cache's states. `page_size` in tokens, `page_bytes` and `row_bytes` in bytes."""

    page_size: int
    page_bytes: int
    row_bytes: int

    def of_state(self, state: CachedState) -> float:
        likely = state.hits + (SUPERSEDED_WEIGHT if state.superseded else 1)
        return self._of(state.position - state.covered_from, likely) + state.used / TAU

    def of_page(self, tokens: float, uses: float, now: float) -> float:
        """The score of a page made at `now`: that of the state which will follow it and save
        `tokens` tokens `uses` times."""
        return self._of(max(tokens, self.page_size), uses) + now / TAU

    def _of(self, tokens: float, uses: float) -> float:
        size = self.row_bytes + tokens / self.page_size * self.page_bytes
        return math.log(tokens * uses / max(size, 1.0))


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
