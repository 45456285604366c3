"""How many waiting tiles the next prefill takes, so that all of them together take least time.

Knows what a launch of each bucket costs by the build's table; knows no sequence. 1,280 tokens in an
engine of buckets of 256, 1,024 and 4,096 are a launch of 1,024 and one of 256, not one of 4,096
that is mostly padding; 4,000 are one launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def first_launch(buckets: Sequence[int], costs: Mapping[int, float]) -> tuple[int, ...]:
    """Tiles to take now, by how many wait: entry w is for w tiles, up to the largest bucket's.

    `buckets` ascend, in tiles; `costs` are microseconds of a launch by bucket. The launches that
    take least time for w tiles are found from those for fewer; the largest of them goes first, so
    that what is left has the same ones. Where a cost is not known, all that wait are taken.
    """
    most = buckets[-1]
    if any(costs.get(b, 0) <= 0 for b in buckets):
        return tuple(range(most + 1))
    total, largest = [0.0], [0]
    for w in range(1, most + 1):
        ways = [(costs[b] + total[max(w - b, 0)], -b) for b in buckets]
        least, negative = min(ways)
        total.append(least)
        largest.append(max(-negative, largest[max(w + negative, 0)]))
    return tuple(min(w, b) for w, b in enumerate(largest))
