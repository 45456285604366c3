"""Which replica gets a request: the one that holds its beginning, unless others are much freer.

Knows replicas by name, how many requests each has, and which prompts went where. Knows no HTTP and
no clock; the simulation (`benchmarks/replicas/simulated.py`) runs the same code.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from spark_engine.runtime.replicas.prefix import Place

REQUEST = 512  # bytes of a prompt worth one more request in front: prefilled in its time
MOST_PLACES = 1 << 17  # that are remembered: some 50 MiB
MOST_PARTS = 64  # where so many prompts part, more make no difference
HOLDERS = 8  # replicas that are remembered for a place


class Policy(enum.StrEnum):
    """By what a replica is chosen."""

    PREFIX = "prefix"
    LEAST = "least"
    TURN = "turn"


@dataclass(frozen=True)
class Choice:
    """A replica, and how many bytes of the prompt went to it before."""

    name: str
    shared: int = 0


@dataclass(slots=True)
class _Known:
    """A place: the replicas that a prompt up to it went to, the place that came next and how often
    another came. Where many prompts part, what is before it will soon be held by all."""

    names: tuple[str, ...] = ()
    next: bytes = b""
    parts: int = 1


@dataclass
class Ticket:
    """A request at a replica: bytes of its prompt that are still to be computed there."""

    name: str
    ahead: int


class Router:
    """The replicas that take requests. `places` bounds what is remembered of prompts."""

    def __init__(self, policy: Policy = Policy.PREFIX, places: int = MOST_PLACES) -> None:
        self._policy, self._most = policy, places
        self._known: OrderedDict[bytes, _Known] = OrderedDict()  # the longest unused first
        self._turn = 0
        self._order: dict[str, int] = {}  # by name: its last turn; the lowest is next
        self.open: dict[str, int] = {}  # requests of each that have not ended
        self._ahead: dict[str, int] = {}  # bytes of their prompts that are not computed yet

    def add(self, name: str) -> None:
        """A replica takes requests from now on; one that was known keeps its count."""
        self._order.setdefault(name, 0)
        self.open.setdefault(name, 0)
        self._ahead.setdefault(name, 0)

    def remove(self, name: str) -> None:
        """It takes no more; what is open is counted on. What it held is forgotten as it is met."""
        self._order.pop(name, None)
        self._forget(name)

    def choose(self, prompt: Sequence[Place], without: Collection[str] = ()) -> Choice | None:
        """A replica for this prompt, none of `without`; None where there is no other."""
        names = [name for name in self._order if name not in without]
        if not names:
            return None
        if self._policy is Policy.TURN:
            return Choice(min(names, key=lambda n: self._order[n]))
        least = min(names, key=lambda n: (self._load(n), self._order[n]))
        if self._policy is Policy.LEAST:
            return Choice(least)
        best, gain = Choice(least), 0.0
        for name, (shared, worth) in self._held(prompt, without).items():
            worth -= self._load(name) - self._load(least)
            if worth > gain or name == least:
                best, gain = Choice(name, shared), max(worth, gain)
        return best

    def begin(self, choice: Choice, prompt: Sequence[Place]) -> Ticket:
        """The request goes to this replica. `started` and `end` say how it goes on."""
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
        """Its first token came: the prompt is computed. May be called twice."""
        self._ahead[ticket.name] -= ticket.ahead
        ticket.ahead = 0

    def end(self, ticket: Ticket) -> None:
        """It has ended."""
        self.started(ticket)
        self.open[ticket.name] -= 1
        if ticket.name not in self._order:
            self._forget(ticket.name)

    def _load(self, name: str) -> int:
        """What a request would find there, as bytes of prompts."""
        return REQUEST * self.open[name] + self._ahead[name]

    def _forget(self, name: str) -> None:
        if not self.open.get(name):
            self.open.pop(name, None)
            self._ahead.pop(name, None)

    def _held(
        self, prompt: Sequence[Place], without: Collection[str]
    ) -> dict[str, tuple[int, float]]:
        """By replica: bytes of the prompt's beginning that went to it before, and what those are
        worth: what many prompts share is worth less, as it is computed once for all of them."""
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
        # the last place first: the beginnings, which more prompts share, are forgotten last
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
