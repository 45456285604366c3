"""The waiting queue: its order, and how many requests of each kind it has.

`first`: requests that ran already (swapped out, or to be prefilled again), and those that wait for
a running prefill to resume from it: by rank, before all others of their priority. The others are in
a `PriorityLine`, except while their grammar is being compiled: they enter it afterwards. Figures
that every step or every new request needs are counted as requests arrive and leave: thousands may
wait.
"""

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import islice

from spark_engine.runtime.engine.policy.line import PriorityLine, TilesLeft
from spark_engine.runtime.engine.policy.shares import Owner, Shares
from spark_engine.runtime.engine.request import Status
from spark_engine.runtime.engine.sequence import Sequence


class Waiting:
    """The waiting requests of an engine; `tile` in tokens.

    `fresh`: requests that no step was launched for; `swapped`: those with a swap copy. Neither
    changes while a sequence waits.
    """

    def __init__(self, tile: int, tiles_left: TilesLeft) -> None:
        self.first: list[Sequence] = []
        self.fresh = self.swapped = 0
        self.shares = Shares()
        self._tile, self._tiles_left = tile, tiles_left
        self._all: OrderedDict[int, Sequence] = OrderedDict()
        self._owners: dict[int, Owner] = {}  # of all that have not ended
        self._lines: dict[int, PriorityLine] = {}
        self._unready: dict[int, Sequence] = {}
        self._ready: deque[int] = deque()  # ids of finished jobs, appended by other threads

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._all.values())

    def oldest(self, count: int) -> list[Sequence]:
        return list(islice(self._all.values(), count))

    def add(self, seq: Sequence) -> None:
        """Adds a new request with its `tiles`; `end` must be called for it."""
        self._owners[seq.id] = self.shares.enter(seq.request.owner)
        self._all[seq.id] = seq
        self._count(seq, 1)
        self._line_up(seq)

    def come_back(self, seq: Sequence) -> None:
        self._all[seq.id] = seq
        self._count(seq, 1)
        insort(self.first, seq, key=rank_of)

    def follow(self, seq: Sequence) -> None:
        """Moves one that waits for a running prefill before others."""
        self._step_out(seq)
        insort(self.first, seq, key=rank_of)

    def leave(self, seq: Sequence) -> None:
        self._step_out(seq)
        del self._all[seq.id]
        self._count(seq, -1)

    def end(self, seq: Sequence) -> None:
        if seq.id in self._all:
            self.leave(seq)
        self.shares.leave(self._owners.pop(seq.id))

    def charge(self, seq: Sequence, tokens: int) -> float:
        """Charges its owner `tokens` tokens of prefill; returns what it was charged before."""
        owner, turn = self._owners[seq.id], self.line(seq.request.priority).turn
        before = owner.charged
        self.shares.charge(owner, tokens, turn is not None and turn is not seq)
        return before

    def put_off(self, seq: Sequence) -> None:
        """Takes one that is not ready out of its line until its job is done."""
        if seq in self.first or seq.constraint is None or seq.constraint.job is None:
            return
        self._step_out(seq)
        self._unready[seq.id] = seq
        number = seq.id
        seq.constraint.job.add_done_callback(lambda _: self._ready.append(number))

    def wake(self) -> None:
        while self._ready:
            seq = self._unready.pop(self._ready.popleft(), None)
            if seq is not None:
                self._line_up(seq)

    def _line_up(self, seq: Sequence) -> None:
        self.line(seq.request.priority).add(seq, self._owners[seq.id])

    def _step_out(self, seq: Sequence) -> None:
        if self._unready.pop(seq.id, None) is not None:
            return
        line = self._lines.get(seq.request.priority)
        if line is not None and seq in line:
            line.remove(seq)
        else:
            self.first.remove(seq)

    def line(self, priority: int) -> PriorityLine:
        line = self._lines.get(priority)
        if line is None:
            self._lines = {p: one for p, one in self._lines.items() if not one.idle}
            line = self._lines[priority] = PriorityLine(self.shares, self._tile, self._tiles_left)
        return line

    def priorities(self) -> list[int]:
        known = {priority for priority, line in self._lines.items() if line}
        return sorted(known | {seq.request.priority for seq in self.first}, reverse=True)

    def _count(self, seq: Sequence, by: int) -> None:
        self.fresh += by * (seq.last_step < 0)
        self.swapped += by * (seq.status is Status.SWAPPED)


def rank_of(seq: Sequence) -> tuple[int, int]:
    return seq.rank
