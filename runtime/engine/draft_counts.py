"""How many drafts were verified and kept, by what made them and by their position in a round."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(slots=True)
class DraftCounts:
    """Counts by position, from 0; `verified[0]` is that of the rounds that verified a draft."""

    verified: list[int]
    kept: list[int]

    @classmethod
    def zeros(cls, most: int) -> "DraftCounts":
        """Of rounds with up to `most` drafts."""
        return cls([0] * most, [0] * most)

    def add(self, offered: npt.NDArray[np.int64], kept: npt.NDArray[np.int64]) -> None:
        """Counts rounds [n]: of each one's `offered` drafts, 1 at least, the first `kept`."""
        for total, rows in ((self.verified, offered), (self.kept, kept)):
            for i, n in enumerate(np.bincount(rows)[:0:-1].cumsum()[::-1].tolist()):
                total[i] += n

    def reach(self, offered: int) -> None:
        """Counts a round that verified so many."""
        for i in range(offered):
            self.verified[i] += 1


BySource = dict[str, DraftCounts]


def joined(parts: Iterable[BySource | None]) -> BySource | None:
    """The sums, by source; None where nothing was counted."""
    found: BySource = {}
    for source, one in (item for part in parts for item in (part or {}).items()):
        sums = found.setdefault(source, DraftCounts.zeros(len(one.verified)))
        sums.verified = [a + b for a, b in zip(sums.verified, one.verified, strict=True)]
        sums.kept = [a + b for a, b in zip(sums.kept, one.kept, strict=True)]
    return found or None
