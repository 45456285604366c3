"""The requests of a run and their times: scripts of turns, and the distribution of their starts.

Knows the bodies of requests; knows no HTTP and no clock. A script is one client's requests. Each
begins with all earlier messages and answers: the script is a conversation or, with one turn, a
single request.
"""

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
    """One request: `new` follows all earlier messages; `most` tokens are to be generated.

    `answer` replaces the server's answer in later turns; None: the server's answer is used.
    `pause_s` passes between the previous answer and this request: a tool runs, or a user types.
    """

    new: Content
    most: int
    answer: Content | None = None
    pause_s: float = 0.0


@dataclass(frozen=True)
class Script:
    """Turns that follow one another. `at_s`: seconds from the run's start to this script's; None:
    it starts when another ends. `more` is merged into every body."""

    turns: tuple[Turn, ...]
    at_s: float | None = None
    more: Json = field(default_factory=dict)


@dataclass(frozen=True)
class Load:
    """Scripts for one run. Without start times, `width` of them run at once."""

    scripts: tuple[Script, ...]
    width: int
    kind: str  # the arrival process, in words

    @property
    def requests(self) -> int:
        """The number of turns of all scripts."""
        return sum(len(script.turns) for script in self.scripts)


@dataclass(frozen=True)
class Arrivals:
    """How scripts start: `closed` at once and one more for each that ends; at random times, `rate`
    a second; or `burst` of them `every_s` seconds, each `stagger_s` after the previous one."""

    closed: int | None = None
    rate: float | None = None
    burst: int | None = None
    every_s: float = 10.0
    stagger_s: float = 0.0

    def check(self) -> None:
        """Raises OptionError unless exactly one of the three is given."""
        chosen = [v for v in (self.closed, self.rate, self.burst) if v is not None]
        if len(chosen) != 1:
            raise OptionError("give one of --closed, --rate and --bursts")

    def spread(
        self, scripts: Sequence[Sequence[Turn]], more: Json | list[Json], rng: random.Random
    ) -> Load:
        """The load of these scripts. `more` is merged into each body, or one of `more` per
        script."""
        times = self._times(len(scripts), rng)
        extras = more if isinstance(more, list) else [more] * len(scripts)
        rows = zip(scripts, times, extras, strict=True)
        made = (Script(tuple(turns), at, own) for turns, at, own in rows)
        return Load(tuple(made), self.closed or len(scripts), self.words)

    @property
    def words(self) -> str:
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


Draw = Callable[[random.Random, str], Load]  # a load; the mark starts all its prompts


@dataclass(frozen=True)
class LoadPlan:
    """What is measured, and how often. `warm` scripts of a load run first and are not counted."""

    draw: Draw
    longest: int | None  # tokens of the longest request; None: unknown
    repeats: int
    warm: int
    processes: int
    targets: Targets
    seed: int
    cards: tuple[str, ...] = ("0",)  # GPUs with logged clocks and power, by nvidia-smi's names
