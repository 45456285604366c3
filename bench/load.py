"""What is asked of a server, and when: scripts of turns, and how their starts are spread.

Knows the bodies of requests; knows no HTTP and no clock. A script is one client's requests, each of
which begins with all that was said before it: a conversation, or where it has one turn a request.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spark_engine.errors import OptionError

Json = dict[str, Any]
Targets = Mapping[str, float]  # milliseconds by latency
Content = list[int] | str | list[Json]  # token ids, text or messages


@dataclass(frozen=True)
class Turn:
    """One request: `new` follows all that was said before, and `most` tokens are to come.

    `answer` is what is said to have been answered, in place of what was; None: what was. `pause_s`
    passes between the answer before and this request: a tool runs, somebody types.
    """

    new: Content
    most: int
    answer: Content | None = None
    pause_s: float = 0.0


@dataclass(frozen=True)
class Script:
    """Turns that follow one another. `at_s`: begins so long after the start; None: when its turn
    comes among those that run at the same time. `more` goes into every body."""

    turns: tuple[Turn, ...]
    at_s: float | None = None
    more: Json = field(default_factory=dict)


@dataclass(frozen=True)
class Load:
    """Scripts for one run. `width` are under way at once where they have no times of their own."""

    scripts: tuple[Script, ...]
    width: int
    kind: str  # how they arrive, in words

    @property
    def requests(self) -> int:
        """Turns of all scripts."""
        return sum(len(script.turns) for script in self.scripts)


@dataclass(frozen=True)
class Arrivals:
    """How scripts begin: `closed` at once and one more for each that ends; at random moments,
    `rate` a second; or `burst` of them `every_s` seconds, each `stagger_s` after the one before."""

    closed: int | None = None
    rate: float | None = None
    burst: int | None = None
    every_s: float = 10.0
    stagger_s: float = 0.0

    def check(self) -> None:
        """Raises OptionError unless exactly one way is chosen."""
        chosen = [v for v in (self.closed, self.rate, self.burst) if v is not None]
        if len(chosen) != 1:
            raise OptionError("give one of --closed, --rate and --bursts")

    def spread(
        self, scripts: Sequence[Sequence[Turn]], more: Json | list[Json], rng: random.Random
    ) -> Load:
        """The load of these scripts, of which each body gets `more`, or each script's its own."""
        times = self._times(len(scripts), rng)
        mores = more if isinstance(more, list) else [more] * len(scripts)
        rows = zip(scripts, times, mores, strict=True)
        made = (Script(tuple(turns), at, own) for turns, at, own in rows)
        return Load(tuple(made), self.closed or len(scripts), self.words)

    @property
    def words(self) -> str:
        """How they arrive."""
        if self.closed is not None:
            return f"{self.closed} at a time"
        if self.rate is not None:
            return f"at random, {self.rate:g} a second"
        gap = f", {self.stagger_s:g} s apart" if self.stagger_s else ""
        return f"bursts of {self.burst}{gap}, every {self.every_s:g} s"

    def _times(self, count: int, rng: random.Random) -> list[float | None]:
        if self.closed is not None:
            return [None] * count
        if self.rate is not None:
            at, times = 0.0, list[float | None]()
            for _ in range(count):
                times.append(at)
                at += rng.expovariate(self.rate)
            return times
        size = self.burst or 1
        return [i // size * self.every_s + i % size * self.stagger_s for i in range(count)]


Draw = Callable[[random.Random, str], Load]  # a load, whose prompts begin with a mark of their own


@dataclass(frozen=True)
class Plan:
    """What is measured, and how often. `warm` scripts of a load are run before and forgotten."""

    draw: Draw
    longest: int | None  # tokens of the longest request; None: nobody counted
    repeats: int
    warm: int
    processes: int
    targets: Targets
    seed: int
    api_key: str | None = None
    cards: tuple[str, ...] = ("0",)  # whose clocks and power are logged, as nvidia-smi knows them
