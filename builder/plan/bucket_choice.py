"""Chooses the finer buckets that pay: those that save a tenth of a launch's time.

Knows sizes and their costs; knows no graph and no GPU. A launch between two bucket sizes runs in
the larger bucket or, if work can be split, in several launches; a size between them pays if it
takes a tenth less. A size's cost is first estimated from its neighbours' costs, so that only
promising sizes are timed.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

PAYS = 0.1  # share of the cost of the launches that a size replaces


def choose(
    base: Sequence[int], finer: Sequence[int], cost: Callable[[int], float], splits: bool
) -> tuple[int, ...]:
    """The sizes of `base` and those of `finer` that pay, ascending.

    `cost`: seconds of a launch of a size; called once per size, for the sizes of `base` and the
        promising ones. `splits`: work of a size can be split into launches of smaller sizes.
    """
    kept = {size: cost(size) for size in sorted(base)}
    gaps = list(pairwise(kept))
    while gaps:
        low, high = gaps.pop(0)
        slope = (kept[high] - kept[low]) / (high - low)
        guess = {s: kept[low] + slope * (s - low) for s in finer if low < s < high}
        gains = {s: _without(s, kept, splits) / c for s, c in guess.items()}
        best = max(gains, key=lambda size: gains[size], default=0)
        if not best or gains[best] < 1 + PAYS:
            continue
        kept[best] = cost(best)
        gaps += [(low, best), (best, high)]
    for size in sorted(set(finer) & kept.keys()):
        others = {s: c for s, c in kept.items() if s != size}
        if _without(size, others, splits) < kept[size] * (1 + PAYS):
            kept = others
    return tuple(sorted(kept))


def _without(size: int, kept: Mapping[int, float], splits: bool) -> float:
    """The cost of work of this size in the present buckets."""
    if not splits:
        return kept[min(s for s in kept if s >= size)]
    least = [0.0]
    for n in range(1, size + 1):
        least.append(min(c + least[max(n - s, 0)] for s, c in kept.items()))
    return least[size]
