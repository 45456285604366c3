"""Chooses a replica for a request: the one with the longest cached prefix, unless others have much
less load.

Knows replicas by name, their numbers of requests, and which prompts they received. Knows no HTTP
and no clock; the simulation (`benchmarks/replicas/simulated.py`) runs the same code.
"""

import enum
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from spark_engine.runtime.replicas.prompt_digests import Place

REQUEST = 512  # bytes of a prompt that take as long to prefill as one waiting request
MOST_PLACES = 1 << 17  # known positions: about 50 MiB
MOST_PARTS = 64  # prompts that diverge at one position; more are counted as this many
HOLDERS = 8  # replicas that are stored per position


class Policy(enum.StrEnum):
    PREFIX = "prefix"
    LEAST = "least"
    TURN = "turn"


@dataclass(frozen=True)
class RouteChoice:
    """A replica, and the number of the prompt's bytes that it received before."""

    name: str
    shared: int = 0


@dataclass(slots=True)
class _Known:
    """A position: the replicas that received a prompt up to it, the next position, and how often
    another one followed. If many prompts diverge here, all replicas will soon have its prefix."""

    names: tuple[str, ...] = ()
    next: bytes = b""
    parts: int = 1


@dataclass
class Ticket:
    """A request at a replica; `bytes`: of its prompt that the replica still has to compute."""

    name: str
    ahead: int


class Router:
    """The replicas that accept requests. `places` limits the number of stored positions."""

    def __init__(self, policy: Policy = Policy.PREFIX, places: int = MOST_PLACES) -> None:
        self._policy, self._most = policy, places
        self._known: OrderedDict[bytes, _Known] = OrderedDict()  # least recently used first
        self._turn = 0
        self._order: dict[str, int] = {}  # by name: index of its last choice; lowest first
        self.open: dict[str, int] = {}  # running requests of each
        self._ahead: dict[str, int] = {}  # bytes of their prompts that are not computed yet

    def add(self, name: str) -> None:
        """Adds a replica; a known one keeps its running requests."""
        self._order.setdefault(name, 0)
        self.open.setdefault(name, 0)
        self._ahead.setdefault(name, 0)

    def remove(self, name: str) -> None:
        """Removes a replica; its running requests stay counted. Its positions are removed when they
        are read."""
        self._order.pop(name, None)
        self._forget(name)

    def choose(self, prompt: Sequence[Place], without: Collection[str] = ()) -> RouteChoice | None:
        """A replica for this prompt, not in `without`; None if there is none."""
        names = [name for name in self._order if name not in without]
        if not names:
            return None
        if self._policy is Policy.TURN:
            return RouteChoice(min(names, key=lambda n: self._order[n]))
        least = min(names, key=lambda n: (self._load(n), self._order[n]))
        if self._policy is Policy.LEAST:
            return RouteChoice(least)
        best, gain = RouteChoice(least), 0.0
        for name, (shared, worth) in self._held(prompt, without).items():
            worth -= self._load(name) - self._load(least)
            if worth > gain or name == least:
                best, gain = RouteChoice(name, shared), max(worth, gain)
        return best

    def begin(self, choice: RouteChoice, prompt: Sequence[Place]) -> Ticket:
        """Records that the request goes to this replica. Call `started` and `end` later."""
        name = choice.name
        ticket = Ticket(name, (prompt[-1].length if prompt else 0) - choice.shared)
        self.open[name] = self.open.get(name, 0) + 1
        self._ahead[name] = self._ahead.get(name, 0) + ticket.ahead
        self._turn += 1
        if name in self._order:
            self._order[name] = self._turn
        if self._policy is Policy.PREFIX:
            self._remember(name, prompt)
        return ticket

    def started(self, ticket: Ticket) -> None:
        """Records the first token: the prompt is computed. May be called twice."""
        self._ahead[ticket.name] -= ticket.ahead
        ticket.ahead = 0

    def end(self, ticket: Ticket) -> None:
        self.started(ticket)
        self.open[ticket.name] -= 1
        if ticket.name not in self._order:
            self._forget(ticket.name)

    def _load(self, name: str) -> int:
        """The wait of a request at this replica, in bytes of prompts."""
        return REQUEST * self.open[name] + self._ahead[name]

    def _forget(self, name: str) -> None:
        if not self.open.get(name):
            self.open.pop(name, None)
            self._ahead.pop(name, None)

    def _held(
        self, prompt: Sequence[Place], without: Collection[str]
    ) -> dict[str, tuple[int, float]]:
        """By replica: bytes of the prompt's prefix that it received before, and their value. A
        prefix that many prompts share counts less, as one computation serves all of them."""
        met: list[tuple[Place, _Known]] = []
        for place in prompt:
            if (known := self._known.get(place.digest)) is None:
                break
            met.append((place, known))
        parts, values = 1, []
        for i in reversed(range(len(met))):
            parts = max(parts, met[i][1].parts)
            values.append((met[i][0].length - (met[i - 1][0].length if i else 0)) / parts)
        found: dict[str, tuple[int, float]] = {}
        worth = 0.0
        for (place, known), value in zip(met, reversed(values), strict=True):
            worth += value
            for name in known.names:
                if name in self._order and name not in without:
                    found[name] = place.length, worth
        return found

    def _remember(self, name: str, prompt: Sequence[Place]) -> None:
        # last position first, so that shared prefixes are the most recently used
        following = b""
        for place in reversed(prompt):
            known = self._known.pop(place.digest, None) or _Known()
            others = tuple(h for h in known.names if h != name and h in self._order)
            known.names = (*others[1 - HOLDERS :], name)
            if following and known.next not in (b"", following):
                known.parts = min(known.parts + 1, MOST_PARTS)
            known.next = following or known.next
            self._known[place.digest] = known
            following = place.digest
        while len(self._known) > self._most:
            self._known.popitem(last=False)
