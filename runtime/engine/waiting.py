"""The waiting queue: new, swapped and restarted sequences, the highest priority first.

Knows their order and how many there are of each kind; not why they wait. What is asked in every
step, or of every new request, is counted as they come and go: thousands may wait.
"""

from __future__ import annotations

from bisect import insort

from spark_engine.errors import InternalError
from spark_engine.runtime.engine.request import Status
from spark_engine.runtime.engine.sequence import Sequence


class Waiting(list[Sequence]):
    """In the order of their ranks; `enter`, `leave` and `give_up` alone change it.

    `fresh`: those that no step was launched for; `swapped`: those that hold a snapshot. Both stand
    fast while a sequence waits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fresh = self.swapped = 0

    def enter(self, seq: Sequence) -> None:
        """It waits from now on."""
        insort(self, seq, key=rank_of)
        self._count(seq, 1)

    def leave(self, at: int) -> None:
        """The one at this place waits no more."""
        self._count(self.pop(at), -1)

    def give_up(self, seq: Sequence) -> None:
        """It waits no more, wherever it stands."""
        self.remove(seq)
        self._count(seq, -1)

    def check(self) -> None:
        """Raises InternalError unless the counts are those of who waits."""
        fresh = sum(seq.last_step < 0 for seq in self)
        swapped = sum(seq.status is Status.SWAPPED for seq in self)
        if (fresh, swapped) != (self.fresh, self.swapped):
            counted = f"{self.fresh} new and {self.swapped} swapped"
            raise InternalError(f"{fresh} new and {swapped} swapped wait, counted {counted}")

    def _count(self, seq: Sequence, by: int) -> None:
        self.fresh += by * (seq.last_step < 0)
        self.swapped += by * (seq.status is Status.SWAPPED)


def rank_of(seq: Sequence) -> tuple[int, int]:
    """As a function, for `insort`."""
    return seq.rank
