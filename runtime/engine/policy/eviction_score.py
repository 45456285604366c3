"""The eviction score of a state or page of the prefix cache: what a byte of it saves.

score = log(tokens saved x expected hits / bytes) + last use / TAU. The likelihood of a hit falls
with time without use and grows with use; it falls alike for all, so time alone never changes the
order of two. A superseded state (its conversation resumed from a later one) is kept for others.
"""

import math
from dataclasses import dataclass

from spark_engine.runtime.engine.policy.prefix_trie import CachedState

TAU = 600.0  # seconds without use after which a state is worth 1/e
SUPERSEDED_WEIGHT = 0.25  # hits expected of a superseded state
# A new state must exceed the score of what is evicted for it by this much. Without it, of more
# agents than fit, asking in turns, each would find its state evicted by those before it. What was
# not used for TAU * HYSTERESIS seconds is evicted all the same.
HYSTERESIS = 0.2


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
