"""What a state or a page of the prefix cache is worth: what a byte of it saves.

That is seconds (taken as tokens, since they are compared with each other only) times how likely
they are asked for again, by byte. The likelihood falls with time without use and grows with use;
since it falls alike for all, the order of two never changes by time alone. Where a conversation
has gone on from a later state, the earlier one is there for others only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from spark_engine.runtime.engine.prefix_trie import CachedState

TAU = 600.0  # seconds without use after which a state is worth 1/e
PASSED = 0.25  # of a use, what is expected of a state that its own conversation has left behind
# What is new must be worth more by this logarithm than what goes for it. Else of more agents than
# fit, who ask in turns, each would find that those before it pushed out what it left. What was not
# used for TAU * STAY seconds goes all the same.
STAY = 0.2


@dataclass(frozen=True)
class Worth:
    """Of one cache. `page_size` in tokens, `page_bytes` and `row_bytes` in bytes."""

    page_size: int
    page_bytes: int
    row_bytes: int

    def of_state(self, state: CachedState) -> float:
        """Logarithm of what a byte of it saves, at the clock's zero."""
        likely = state.hits + (PASSED if state.passed else 1)
        return self._of(state.position - state.since, likely) + state.used / TAU

    def of_page(self, tokens: float, uses: float, now: float) -> float:
        """The same of a page that is made now: as much as the state that will stand behind it,
        which saves so many `tokens` as often as `uses` says."""
        return self._of(max(tokens, self.page_size), uses) + now / TAU

    def _of(self, tokens: float, uses: float) -> float:
        size = self.row_bytes + tokens / self.page_size * self.page_bytes
        return math.log(tokens * uses / max(size, 1.0))
