"""The waiting queue: who goes first of those that wait, and how many of each kind there are.

`first` are those that have run already (swapped out, or to be prefilled again), and those that wait
to go on from one that is being prefilled: in the order of their ranks, before all others of their
priority. The others are in a `Line` of their priority, but for those whose grammar is still being
made: they enter it when that is done. What is asked in every step, or of every new request, is
counted as requests come and go: thousands may wait.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import islice

from spark_engine.errors import InternalError
from spark_engine.runtime.engine.line import Line
from spark_engine.runtime.engine.request import Status
from spark_engine.runtime.engine.sequence import Sequence
from spark_engine.runtime.engine.shares import Owner, Shares


class Waiting:
    """Those of one engine; `tile` in tokens.

    `fresh`: those that no step was launched for; `swapped`: those that hold a snapshot. Neither
    changes while a sequence waits.
    """

    def __init__(self, tile: int) -> None:
        self.first: list[Sequence] = []
        self.fresh = self.swapped = 0
        self.shares = Shares()
        self._tile = tile
        self._all: OrderedDict[int, Sequence] = OrderedDict()
        self._owners: dict[int, Owner] = {}  # of all that have not ended
        self._lines: dict[int, Line] = {}
        self._unready: dict[int, Sequence] = {}
        self._ready: deque[int] = deque()  # other threads say whose job is done

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._all.values())

    def oldest(self, count: int) -> list[Sequence]:
        """So many that entered first."""
        return list(islice(self._all.values(), count))

    # Who comes and goes.

    def add(self, seq: Sequence) -> None:
        """A new one, whose `tiles` say how much it is to compute. `end` is to be called for it."""
        self._owners[seq.id] = self.shares.enter(seq.request.owner)
        self._all[seq.id] = seq
        self._count(seq, 1)
        self._line_up(seq)

    def come_back(self, seq: Sequence) -> None:
        """One that ran waits again."""
        self._all[seq.id] = seq
        self._count(seq, 1)
        insort(self.first, seq, key=rank_of)

    def follow(self, seq: Sequence) -> None:
        """It waits for one that is being prefilled, before others."""
        self._step_out(seq)
        insort(self.first, seq, key=rank_of)

    def leave(self, seq: Sequence) -> None:
        """It waits no more: it has ended, or runs."""
        self._step_out(seq)
        del self._all[seq.id]
        self._count(seq, -1)

    def end(self, seq: Sequence) -> None:
        """It has ended, wherever it was."""
        if seq.id in self._all:
            self.leave(seq)
        self.shares.leave(self._owners.pop(seq.id))

    def charge(self, seq: Sequence, tokens: int) -> None:
        """It begins: its owner receives so many tokens of prefill."""
        owner, turn = self._owners[seq.id], self.line(seq.request.priority).turn
        seq.tag = owner.charged
        self.shares.charge(owner, tokens, turn is not None and turn is not seq)

    def put_off(self, seq: Sequence) -> None:
        """It is not ready: nobody waits for it, and it goes on when its job is done."""
        if seq in self.first or seq.guide is None or seq.guide.job is None:
            return
        self._step_out(seq)
        self._unready[seq.id] = seq
        number = seq.id
        seq.guide.job.add_done_callback(lambda _: self._ready.append(number))

    def wake(self) -> None:
        """Those whose jobs are done wait in their lines again."""
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

    # Lines.

    def line(self, priority: int) -> Line:
        """Of one priority, with what is known of its turn."""
        line = self._lines.get(priority)
        if line is None:
            self._lines = {p: one for p, one in self._lines.items() if not one.idle}
            line = self._lines[priority] = Line(self.shares, self._tile)
        return line

    def priorities(self) -> list[int]:
        """Of those that wait, the highest first."""
        known = {priority for priority, line in self._lines.items() if line}
        return sorted(known | {seq.request.priority for seq in self.first}, reverse=True)

    # Accounts.

    def check(self) -> None:
        """Raises InternalError unless the counts are those of who waits, each in one place."""
        fresh = sum(seq.last_step < 0 for seq in self)
        swapped = sum(seq.status is Status.SWAPPED for seq in self)
        if (fresh, swapped) != (self.fresh, self.swapped):
            counted = f"{self.fresh} new and {self.swapped} swapped"
            raise InternalError(f"{fresh} new and {swapped} swapped wait, counted {counted}")
        lined = sum(map(len, self._lines.values()))
        if lined + len(self.first) + len(self._unready) != len(self) or not self.shares.check():
            raise InternalError(
                f"{len(self)} wait, {lined} of them in line, {len(self.first)} before that and "
                f"{len(self._unready)} for a grammar; {len(self.shares)} owners"
            )

    def _count(self, seq: Sequence, by: int) -> None:
        self.fresh += by * (seq.last_step < 0)
        self.swapped += by * (seq.status is Status.SWAPPED)


def rank_of(seq: Sequence) -> tuple[int, int]:
    """As a function, for `insort`."""
    return seq.rank
