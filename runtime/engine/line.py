"""The requests of one priority that have not started, and how those that have share prefill.

Two orders count. The *turn* belongs to one request: the oldest of the owner that was charged least
(`shares`), or one that has started and came before that. Shorter ones may overtake it, where owners
are even, until they were given as many tiles as it had when it came, or BURST; from then on every
second tile is the turn's. So the turn's request is overtaken by at most twice its tiles, and a
short one waits for a few tiles, however many wait before it. The same holds for an owner's oldest
request among that owner's. The last free slot is the turn's every second time.

All is kept in heaps, since thousands may wait: nothing here goes through the queue. An entry may be
out of date, which is seen when it comes to the top. Knows lengths, in tiles; no slot and no page.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate

from spark_engine.runtime.engine.request import Status
from spark_engine.runtime.engine.sequence import Sequence
from spark_engine.runtime.engine.shares import Owner, Shares

BURST = 32  # tiles that overtake the turn at once
SLACK = 64  # entries of a heap that may be out of date, in addition to as many as are not

Key = tuple[float, float, int]


@dataclass(slots=True)
class Launch:
    """The prefill launch that is being filled, of `most` tiles.

    Attributes:
        started: those of the line's priority that run and are prefilled, without new ones.
        lefts: tiles that those which run have left, of this priority and above, ascending.
        open_most: so many of them may be under way behind it.
        last: one slot is left, which the turn has every second time.
    """

    most: int
    started: list[Sequence]
    lefts: list[int]
    open_most: int
    last: bool = False


class _Flow:
    """One owner's requests in a line: ids by arrival, and (tiles, id). `debt`: tiles of its
    requests that overtook its oldest."""

    def __init__(self, owner: Owner) -> None:
        self.owner, self.debt = owner, 0
        self.waiting: dict[int, Sequence] = {}
        self.ages: list[int] = []
        self.sizes: list[tuple[int, int]] = []

    def oldest(self) -> Sequence:
        """The one that came first."""
        while self.ages[0] not in self.waiting:
            heapq.heappop(self.ages)
        return self.waiting[self.ages[0]]

    def shortest(self) -> Sequence:
        """The one with the fewest tiles; of several the one that came first."""
        while self.sizes[0][1] not in self.waiting:
            heapq.heappop(self.sizes)
        return self.waiting[self.sizes[0][1]]

    def next(self) -> Sequence:
        """The shortest, or the oldest where that was overtaken enough."""
        oldest = self.oldest()
        return oldest if self.debt >= _limit(oldest) else self.shortest()

    def add(self, seq: Sequence) -> None:
        """It waits from now on."""
        self.waiting[seq.id] = seq
        if len(self.ages) > SLACK + 2 * len(self.waiting):
            self.ages = sorted(self.waiting)
        else:
            heapq.heappush(self.ages, seq.id)
        if len(self.sizes) > SLACK + 2 * len(self.waiting):
            self.sizes = sorted((s.tiles, s.id) for s in self.waiting.values())
        else:
            heapq.heappush(self.sizes, (seq.tiles, seq.id))


def _start(flow: _Flow) -> Key:
    return flow.owner.charged, flow.owner.turn, flow.oldest().id


def _passed(flow: _Flow) -> Key:
    return flow.owner.overtook, 0, 0


def _size(flow: _Flow) -> Key:
    seq = flow.next()
    return seq.tiles, flow.owner.charged, seq.id


class Line:
    """Those of one priority. `tile`: tokens of a tile.

    Attributes:
        turn: whose turn it is, waiting or running; None: it is chosen when it is asked for.
        debt: tiles that others were given before it.
    """

    def __init__(self, shares: Shares, tile: int) -> None:
        self.turn: Sequence | None = None
        self.debt = 0
        self._shares, self._tile = shares, tile
        self._flows: dict[str, _Flow] = {}
        self._starts: list[tuple[Key, str]] = []
        self._sizes: list[tuple[Key, str]] = []
        self._ahead: list[tuple[Key, str]] = []  # those that were taken from _sizes
        self._count = 0
        self._lends = False  # the last slot may go to one that overtakes the turn

    def __len__(self) -> int:
        return self._count

    def __contains__(self, seq: Sequence) -> bool:
        flow = self._flows.get(seq.request.owner)
        return flow is not None and seq.id in flow.waiting

    @property
    def idle(self) -> bool:
        """Nobody waits, and the one that had the turn has been prefilled."""
        return not (self._count or (self.turn is not None and _has_started(self.turn)))

    def add(self, seq: Sequence, owner: Owner) -> None:
        """It waits from now on; its `tiles` stay as they are."""
        flow = self._flows.get(owner.name)
        if flow is None:
            flow = self._flows[owner.name] = _Flow(owner)
        self._shares.wait(owner)
        flow.add(seq)
        self._count += 1
        self._note(flow)

    def _note(self, flow: _Flow) -> None:
        """Its keys may be less than those that are noted."""
        for heap, key in ((self._starts, _start), (self._sizes, _size)):
            if len(heap) > SLACK + 2 * len(self._flows):
                heap[:] = sorted((key(one), name) for name, one in self._flows.items())
            else:
                heapq.heappush(heap, (key(flow), flow.owner.name))

    def remove(self, seq: Sequence) -> None:
        """It waits no more."""
        flow = self._flows[seq.request.owner]
        flow.debt = 0 if seq is flow.oldest() else flow.debt + seq.tiles
        del flow.waiting[seq.id]
        self._shares.wait_no_more(flow.owner)
        self._count -= 1
        if flow.waiting:
            self._note(flow)
        else:
            del self._flows[flow.owner.name]

    def shortest(self) -> Sequence | None:
        """The shortest, of the owners that did not overtake others by more than BURST; or else
        whose turn it would be."""
        even = self._shares.clock + BURST * self._tile
        while (flow := self._top(self._ahead, _passed)) and flow.owner.overtook <= even:
            heapq.heappush(self._sizes, (_size(flow), heapq.heappop(self._ahead)[1]))
        while flow := self._top(self._sizes, _size):
            if flow.owner.overtook <= even:
                return flow.next()
            heapq.heappush(self._ahead, (_passed(flow), heapq.heappop(self._sizes)[1]))
        return self.next_turn()

    def next_turn(self) -> Sequence | None:
        """The oldest of the owner that was charged least."""
        flow = self._top(self._starts, _start)
        return None if flow is None else flow.oldest()

    def _top(self, heap: list[tuple[Key, str]], key: Callable[[_Flow], Key]) -> _Flow | None:
        while heap:
            noted, name = heap[0]
            flow = self._flows.get(name)
            if flow is None or (now := key(flow)) < noted:  # a better entry was added with that
                heapq.heappop(heap)
            elif now > noted:
                heapq.heapreplace(heap, (now, name))
            else:
                return flow
        return None

    # The turn.

    def find_turn(self, started: Iterable[Sequence]) -> Sequence | None:
        """Whose turn it is; `started` are the line's that run and are prefilled."""
        if self.turn is not None and (_has_started(self.turn) or self.turn in self):
            return self.turn
        first, fresh = min(started, key=_by_tag, default=None), self.next_turn()
        self.turn, self.debt = first, 0
        if fresh is not None:
            flow = self._flows[fresh.request.owner]
            if first is None or _goes_before(fresh, flow.owner, first):
                self.turn, self.debt = fresh, flow.debt
                self._shares.gives_turn(flow.owner)
        return self.turn

    def next(self, launch: Launch) -> Sequence | None:
        """Who waits and is to begin now; None: the launch is full."""
        seq, before, most = self.shortest(), 0, launch.most
        if seq is None:
            return None
        turn = self.find_turn(launch.started)
        due = turn is not None and self.debt >= _limit(turn)
        if turn is not None and turn in self:
            seq = turn if due or (launch.last and not self._lends) else seq
        elif turn is not None and due:
            before = min(tiles_left(turn, self._tile), (most + 1) // 2)
        if not (due and seq is turn):
            before += sum(left for left in launch.lefts if left <= seq.tiles)
        under_way = sum(done > most for done in accumulate(launch.lefts))
        if before >= most or (before + seq.tiles > most and under_way >= launch.open_most):
            return None
        return seq

    def takes_the_last_slot(self, seq: Sequence) -> None:
        """One that waits takes the last slot."""
        if self.turn is not None and self.turn in self:
            self._lends = seq is self.turn and self.shortest() is not seq

    # Tiles.

    def _note_tiles(self, seq: Sequence, count: int) -> None:
        """The turn makes good for what overtook it, and the rest of its owner's requests."""
        if seq is not self.turn:
            self.debt += count * (self.turn is not None and seq.id > self.turn.id)
            return
        self.debt = max(0, self.debt - count)
        flow = self._flows.get(seq.request.owner)
        if flow is not None and flow.debt:
            flow.debt = max(0, flow.debt - count)
            self._note(flow)

    def share(self, started: list[Sequence], tiles: int) -> dict[Sequence, int]:
        """So many tiles, or as many as there are, shared among `started`, in their order."""
        left = {seq: -(-(seq.prefill_end - seq.launched) // self._tile) for seq in started}
        short = {seq: tiles_left(seq, self._tile) for seq in started}
        queue = sorted(started, key=lambda s: (short[s], s.id))
        given: dict[Sequence, int] = {}
        while tiles > 0 and queue:
            turn, first = self.find_turn(queue), queue[0]
            who, most = first, left[first]
            if turn in left and turn is not first:
                if short[turn] <= short[first]:
                    who, most = turn, left[turn]
                elif self.debt >= _limit(turn):
                    who, most = turn, 1
                elif first.id > turn.id:
                    most = min(most, _limit(turn) - self.debt)
            count = min(tiles, most)
            self._note_tiles(who, count)
            given[who] = given.get(who, 0) + count
            left[who] -= count
            short[who] = short[who] - count if short[who] > count else left[who]
            tiles -= count
            if not left[who]:
                queue.remove(who)
                del left[who]
                if who is turn:
                    self.turn = None
        return given


def tiles_left(seq: Sequence, tile: int) -> int:
    """Of one that is prefilled; one that others wait for counts as no longer than that."""
    end = seq.awaited[0] if seq.awaited else seq.prefill_end
    return -(-(end - seq.launched) // tile)


def _limit(turn: Sequence) -> int:
    """Tiles that may overtake it at once."""
    return min(turn.tiles, BURST)


def _has_started(seq: Sequence) -> bool:
    return seq.status is Status.RUNNING and seq.launched < seq.prefill_end


def _by_tag(seq: Sequence) -> tuple[float, int]:
    return seq.tag, seq.id


def _goes_before(fresh: Sequence, owner: Owner, started: Sequence) -> bool:
    """Whether the turn goes to one that waits: of one owner to the older one."""
    if fresh.request.owner == started.request.owner:
        return fresh.id < started.id
    return owner.charged < started.tag
