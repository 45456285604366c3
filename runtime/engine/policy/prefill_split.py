"""How many waiting tiles the next prefill takes, so that all of them together take least time.

Knows the cost of a launch of each bucket by the build's table; knows no sequence. 1,280 tokens in
an engine of buckets of 256, 1,024 and 4,096 are a launch of 1,024 and one of 256, not one of 4,096
that is mostly padding; 4,000 are one launch.
"""

from collections.abc import Mapping, Sequence


class PrefillSplit:
    """For these `buckets`, ascending, in tiles, and their `costs`, microseconds of a launch.

    The launches of least time for w tiles follow from those for fewer (dynamic programming), up to
    the count asked for: a first token may wait for this. The largest launch goes first, so the
    rest has the same launches. Where a cost is unknown, all waiting tiles are taken.
    """

    def __init__(self, buckets: Sequence[int], costs: Mapping[int, float]) -> None:
        self._launches = [(b, costs.get(b, 0.0)) for b in buckets]
        self._known = all(cost > 0 for _, cost in self._launches)
        self._total, self._largest = [0.0], [0]  # by tiles: microseconds, the largest launch

    def first(self, waiting: int) -> int:
        """Tiles to take now of `waiting`, at most the largest bucket's."""
        if not self._known:
            return waiting
        total, largest = self._total, self._largest
        for w in range(len(total), waiting + 1):
            least, negative = min((cost + total[max(w - b, 0)], -b) for b, cost in self._launches)
            total.append(least)
            largest.append(max(-negative, largest[max(w + negative, 0)]))
        return min(waiting, largest[waiting])
