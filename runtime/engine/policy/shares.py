"""What each owner of requests has received: the virtual clock of weighted fair queueing.

An owner is an API key or a connection. Knows names, tokens and counts; no request and no slot.

- An owner is charged the prompt tokens that are computed for it when its prefill starts. Of the
  owners that wait, the one that was charged least is next.
- The clock is what each would have been charged if all waiting owners shared evenly at all times.
  An owner that starts to wait starts there, so time without requests earns nothing. An owner ahead
  of the clock is kept until the clock reaches it, also without requests.
- What an owner received by overtaking others is counted separately (`overtook`).
"""

import heapq
from dataclasses import dataclass
from itertools import count


@dataclass(slots=True, eq=False)
class Owner:
    """Attributes:
    name: as requests have it.
    charged: tokens, on the clock of its `Shares`; `overtook`: the same of what overtook others.
    turn: grows with each turn of any owner: of equals, the one with the earliest turn is first.
    waiting: its requests that wait and have not started.
    live: its requests that have not ended.
    ahead: it is beyond the clock, and none of its requests waits."""

    name: str
    charged: float
    overtook: float
    turn: int = 0
    waiting: int = 0
    live: int = 0
    ahead: bool = False


class Shares:
    """The owners that have unfinished requests, or are ahead; the others are forgotten, and all of
    them when no request is left. `clock` in tokens."""

    def __init__(self) -> None:
        self._owners: dict[str, Owner] = {}
        self.clock = 0.0
        self._live = 0  # requests
        self._sharing = 0  # owners that wait or are ahead
        self._ahead: list[tuple[float, int, Owner]] = []  # a heap; an entry may be out of date
        self._tick = count(1)

    def __len__(self) -> int:
        return len(self._owners)

    def enter(self, name: str) -> Owner:
        """Counts a new request of this owner; `leave` must follow when it has ended."""
        owner = self._owners.get(name)
        if owner is None:
            owner = self._owners[name] = Owner(name, self.clock, self.clock)
        owner.live += 1
        self._live += 1
        return owner

    def leave(self, owner: Owner) -> None:
        owner.live -= 1
        self._live -= 1
        self._forget(owner)
        if not self._live:
            self._owners, self._ahead = {}, []
            self.clock, self._sharing = 0.0, 0

    def wait(self, owner: Owner) -> None:
        if not owner.waiting:
            owner.charged = max(owner.charged, self.clock)
            owner.overtook = max(owner.overtook, self.clock)
            self._sharing += not owner.ahead
            owner.ahead = False
        owner.waiting += 1

    def wait_no_more(self, owner: Owner) -> None:
        owner.waiting -= 1
        if not owner.waiting:
            self._sharing -= 1
            self._note(owner)

    def gives_turn(self, owner: Owner) -> None:
        """Makes it the last of those that were charged as much."""
        owner.turn = next(self._tick)

    def charge(self, owner: Owner, tokens: int, overtakes: bool = False) -> None:
        """Charges tokens that are to be computed; `advance` follows when they are."""
        owner.charged += tokens
        owner.overtook += tokens * overtakes
        if tokens and not owner.waiting:
            self._note(owner)

    def _note(self, owner: Owner) -> None:
        """Records an owner without waiting requests, which may be ahead."""
        if owner.charged > self.clock:
            self._sharing += not owner.ahead
            owner.ahead = True
            heapq.heappush(self._ahead, (owner.charged, next(self._tick), owner))

    def advance(self, tokens: float) -> None:
        """Moves the clock by `tokens` computed tokens."""
        while tokens > 0 and self._sharing:
            while self._ahead and not _is_ahead(*self._ahead[0]):
                heapq.heappop(self._ahead)
            step = tokens / self._sharing
            if self._ahead and self._ahead[0][0] <= self.clock + step:
                at, _, owner = heapq.heappop(self._ahead)
                tokens -= max(0.0, at - self.clock) * self._sharing
                self.clock = max(self.clock, at)
                owner.ahead = False
                self._sharing -= 1
                self._forget(owner)
            else:
                self.clock += step
                return

    def _forget(self, owner: Owner) -> None:
        if not owner.live and not owner.ahead:
            self._owners.pop(owner.name, None)


def _is_ahead(at: float, tick: int, owner: Owner) -> bool:
    return owner.ahead and owner.charged == at
