"""How many waiting tiles the next prefill takes, so that all of them together take least time.

Knows what a launch of each bucket costs by the build's table; knows no sequence. 1,280 tokens in an
engine of buckets of 256, 1,024 and 4,096 are a launch of 1,024 and one of 256, not one of 4,096
that is mostly padding; 4,000 are one launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class PrefillSplit:
    """For these `buckets`, ascending, in tiles, and their `costs`, microseconds of a launch.

    The launches that take least time for w tiles are found from those for fewer, and only up to
    what was asked for: a first token may wait for this. The largest of them goes first, so that
    what is left has the same ones. Where a cost is not known, all that wait are taken.
    """

    def __init__(self, buckets: Sequence[int], costs: Mapping[int, float]) -> None:
        self._launches = [(b, costs.get(b, 0.0)) for b in buckets]
        self._known = all(cost > 0 for _, cost in self._launches)
        self._total, self._largest = [0.0], [0]  # by tiles: microseconds, the largest launch

    def first(self, waiting: int) -> int:
        """Tiles to take now of so many that wait, at most the largest bucket's."""
        if not self._known:
            return waiting
        total, largest = self._total, self._largest
        for w in range(len(total), waiting + 1):
            least, negative = min((cost + total[max(w - b, 0)], -b) for b, cost in self._launches)
            total.append(least)
            largest.append(max(-negative, largest[max(w + negative, 0)]))
        return min(waiting, largest[waiting])
