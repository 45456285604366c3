"""The requests of one priority that have not started, and how those that have share prefill.

Two orders count. The *turn* belongs to one request: the oldest of the owner that was charged least
(`shares`), or an earlier one that has started. Shorter requests may overtake it, where owners are
even, until they received as many tiles as it had on arrival, or BURST; from then on every second
tile is the turn's. So the turn's request is overtaken by at most twice its tiles, and a short one
waits for a few tiles, however many wait before it. The same bound applies to an owner's oldest
request among that owner's. The last free slot is the turn's every second time.

Heaps hold everything, since thousands may wait: nothing here iterates over the queue. A stale entry
is detected when it reaches the top. Knows lengths, in tiles; no slot and no page.
"""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate

from spark_engine.runtime.engine.policy.shares import Owner, Shares
from spark_engine.runtime.engine.request import Status
from spark_engine.runtime.engine.sequence import Sequence

BURST = 32  # tiles that overtake the turn at once
STALE = 64  # entries of a heap that may be out of date, in addition to as many as are not

Key = tuple[float, float, int]
TilesLeft = Callable[[Sequence], int]  # of a prefill, at least up to where others wait for it


@dataclass(slots=True)
class PrefillLaunch:
    """The prefill launch that is being filled, of `most` tiles.

    Attributes:
        started: running prefills of the line's priority, without new ones.
        lefts: tiles left of each running prefill of this priority and above, ascending.
        open_most: so many of them may be incomplete after the launch.
        last: one slot is left, which the turn has every second time.
    """

    most: int
    started: list[Sequence]
    remaining: list[int]
    open_most: int
    last: bool = False


class _Flow:
    """One owner's requests in a line. `ages`: heap of ids; `sizes`: heap of (tiles, id); `debt`:
    tiles of its requests that overtook its oldest."""

    def __init__(self, owner: Owner) -> None:
        self.owner, self.debt = owner, 0
        self.waiting: dict[int, Sequence] = {}
        self.ages: list[int] = []
        self.sizes: list[tuple[int, int]] = []

    def oldest(self) -> Sequence:
        while self.ages[0] not in self.waiting:
            heapq.heappop(self.ages)
        return self.waiting[self.ages[0]]

    def shortest(self) -> Sequence:
        """The one with the fewest tiles; of several the first to arrive."""
        while self.sizes[0][1] not in self.waiting:
            heapq.heappop(self.sizes)
        return self.waiting[self.sizes[0][1]]

    def next(self) -> Sequence:
        """The shortest, or the oldest once it was overtaken by its limit."""
        oldest = self.oldest()
        return oldest if self.debt >= _limit(oldest) else self.shortest()

    def add(self, seq: Sequence) -> None:
        self.waiting[seq.id] = seq
        heapq.heappush(self.ages, seq.id)
        heapq.heappush(self.sizes, (seq.tiles, seq.id))
        if len(self.ages) > STALE + 2 * len(self.waiting):
            self.ages = sorted(self.waiting)
        if len(self.sizes) > STALE + 2 * len(self.waiting):
            self.sizes = sorted((s.tiles, s.id) for s in self.waiting.values())


def _start(flow: _Flow) -> Key:
    return flow.owner.charged, flow.owner.turn, flow.oldest().id


def _passed(flow: _Flow) -> Key:
    return flow.owner.overtook, 0, 0


def _size(flow: _Flow) -> Key:
    seq = flow.next()
    return seq.tiles, flow.owner.charged, seq.id


class PriorityLine:
    """The waiting requests of one priority. `tile`: tokens of a tile.

    Attributes:
        turn: the request that has the turn, waiting or running; None: chosen on demand.
        debt: tiles that later requests received before it.
    """

    def __init__(self, shares: Shares, tile: int, tiles_left: TilesLeft) -> None:
        self.turn: Sequence | None = None
        self.debt = 0
        self._shares, self._tile, self._tiles_left = shares, tile, tiles_left
        self._flows: dict[str, _Flow] = {}
        self._starts: list[tuple[Key, str]] = []
        self._sizes: list[tuple[Key, str]] = []
        self._ahead: list[tuple[Key, str]] = []  # moved here from _sizes
        self._count = 0
        self._may_overtake = False  # the last slot may go to one that overtakes the turn

    def __len__(self) -> int:
        return self._count

    def __contains__(self, seq: Sequence) -> bool:
        flow = self._flows.get(seq.request.owner)
        return flow is not None and seq.id in flow.waiting

    @property
    def idle(self) -> bool:
        """No request waits, and the turn's has been prefilled."""
        return not (self._count or (self.turn is not None and _has_started(self.turn)))

    def add(self, seq: Sequence, owner: Owner) -> None:
        flow = self._flows.get(owner.name)
        if flow is None:
            flow = self._flows[owner.name] = _Flow(owner)
        self._shares.wait(owner)
        flow.add(seq)
        self._count += 1
        self._note(flow)

    def _note(self, flow: _Flow) -> None:
        """Pushes a flow's keys, which may be less than its entries."""
        for heap, key in ((self._starts, _start), (self._sizes, _size)):
            if len(heap) > STALE + 2 * len(self._flows):
                heap[:] = sorted((key(one), name) for name, one in self._flows.items())
            else:
                heapq.heappush(heap, (key(flow), flow.owner.name))

    def remove(self, seq: Sequence) -> None:
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
        the next turn's."""
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
            if flow is None or (now := key(flow)) < noted:  # a better entry exists
                heapq.heappop(heap)
            elif now > noted:
                heapq.heapreplace(heap, (now, name))
            else:
                return flow
        return None

    def find_turn(self, started: Iterable[Sequence]) -> Sequence | None:
        """The turn's request; `started`: the line's running prefills."""
        if self.turn is not None and (_has_started(self.turn) or self.turn in self):
            return self.turn
        first, fresh = (
            min(started, key=lambda seq: (seq.tag, seq.id), default=None),
            self.next_turn(),
        )
        self.turn, self.debt = first, 0
        if fresh is not None:
            flow = self._flows[fresh.request.owner]
            if first is None or _goes_before(fresh, flow.owner, first):
                self.turn, self.debt = fresh, flow.debt
                self._shares.gives_turn(flow.owner)
        return self.turn

    def next(self, launch: PrefillLaunch) -> Sequence | None:
        """The waiting request to start now; None: the launch is full."""
        seq, before, most = self.shortest(), 0, launch.most
        if seq is None:
            return None
        turn = self.find_turn(launch.started)
        due = turn is not None and self.debt >= _limit(turn)
        if turn is not None and turn in self:
            seq = turn if due or (launch.last and not self._may_overtake) else seq
        elif turn is not None and due:
            before = min(self._tiles_left(turn), (most + 1) // 2)
        if not (due and seq is turn):
            before += sum(left for left in launch.remaining if left <= seq.tiles)
        unfinished = sum(done > most for done in accumulate(launch.remaining))
        if before >= most or (before + seq.tiles > most and unfinished >= launch.open_most):
            return None
        return seq

    def takes_the_last_slot(self, seq: Sequence) -> None:
        if self.turn is not None and self.turn in self:
            self._may_overtake = seq is self.turn and self.shortest() is not seq

    def _note_tiles(self, seq: Sequence, count: int) -> None:
        """The turn's own tiles reduce its debt, and that of its owner's requests."""
        if seq is not self.turn:
            self.debt += count * (self.turn is not None and seq.id > self.turn.id)
            return
        self.debt = max(0, self.debt - count)
        flow = self._flows.get(seq.request.owner)
        if flow is not None and flow.debt:
            flow.debt = max(0, flow.debt - count)
            self._note(flow)

    def share(self, started: list[Sequence], tiles: int) -> dict[Sequence, int]:
        """Shares at most `tiles` tiles among `started`: how many each gets, in order of launch."""
        left = {seq: -(-(seq.prefill_end - seq.launched) // self._tile) for seq in started}
        short = {seq: self._tiles_left(seq) for seq in started}
        queue = sorted(started, key=lambda s: (short[s], s.id))
        given: dict[Sequence, int] = {}
        while tiles > 0 and queue:
            turn, first = self.find_turn(queue), queue[0]
            chosen, most = first, left[first]
            if turn in left and turn is not first:
                if short[turn] <= short[first]:
                    chosen, most = turn, left[turn]
                elif self.debt >= _limit(turn):
                    chosen, most = turn, 1
                elif first.id > turn.id:
                    most = min(most, _limit(turn) - self.debt)
            count = min(tiles, most)
            self._note_tiles(chosen, count)
            given[chosen] = given.get(chosen, 0) + count
            left[chosen] -= count
            short[chosen] = short[chosen] - count if short[chosen] > count else left[chosen]
            tiles -= count
            if not left[chosen]:
                queue.remove(chosen)
                del left[chosen]
                if chosen is turn:
                    self.turn = None
        return given


def _limit(turn: Sequence) -> int:
    return min(turn.tiles, BURST)


def _has_started(seq: Sequence) -> bool:
    return seq.status is Status.RUNNING and seq.launched < seq.prefill_end


def _goes_before(fresh: Sequence, owner: Owner, started: Sequence) -> bool:
    """True if the turn passes to a waiting request: of one owner to the earlier one."""
    if fresh.request.owner == started.request.owner:
        return fresh.id < started.id
    return owner.charged < started.tag
