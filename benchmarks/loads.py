"""Loads that a server is judged by: gaps between tokens, first tokens, rates.

A server is an engine in this process (`served_load`) or one that is reckoned (`pacing`); both are
driven step by step, so that what differs between two runs is the pacing and nothing else. Lengths
are drawn from a seed of their own.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

WIDTH, REQUESTS = 64, 256  # of the mixed load: in flight, and in all
PROMPTS, OUTPUTS = (512, 2048), (64, 256)  # tokens of its requests
LIVE_PROMPT, LONG_PROMPT, SHORT_PROMPT = 1024, 8192, 1024  # of those alive, and of arrivals
SETTLE = 8  # steps before something is looked at
BURSTS, BURST = 10, 32


class Server(Protocol):
    """What a load is run on. Requests make exactly as many tokens as they are told."""

    def submit(self, prompt: int, out: int) -> int:
        """Queues a request of `prompt` random tokens; its number."""

    def step(self) -> list[int]:
        """One step: the number of a request for each token that came."""

    def end(self, number: int) -> None:
        """Ends a request before its last token."""

    def now(self) -> float:
        """Seconds."""

    def computed(self) -> tuple[int, int]:
        """Tokens of prefill that were asked for, and that launches had room for, so far."""


@dataclass
class Told:
    """One request: when it was submitted, and when each of its tokens came."""

    prompt: int
    out: int
    at: float
    tokens: list[float] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """All tokens came."""
        return len(self.tokens) == self.out

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.tokens[0] - self.at

    def gaps(self, start: float = 0.0, end: float = float("inf")) -> list[float]:
        """Seconds between tokens, of those that came in this time."""
        return [
            b - a for a, b in zip(self.tokens, self.tokens[1:], strict=False) if start < b <= end
        ]


class Run:
    """Requests on their way through one server."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.told: dict[int, Told] = {}
        self.steps: list[float] = []  # seconds of each

    def submit(self, prompt: int, out: int) -> Told:
        """Queues one."""
        number = self.server.submit(prompt, out)
        self.told[number] = Told(prompt, out, self.server.now())
        return self.told[number]

    def step(self) -> list[Told]:
        """One step; those that ended with it."""
        before = self.server.now()
        came = self.server.step()
        now = self.server.now()
        self.steps.append(now - before)
        for number in came:
            self.told[number].tokens.append(now)
        return [t for n in dict.fromkeys(came) if (t := self.told[n]).done]

    def until(self, several: Sequence[Told], tokens: int = 0) -> None:
        """Steps until each of them has so many tokens, or all where none are named."""
        while any(len(t.tokens) < (tokens or t.out) for t in several):
            self.step()

    def end(self) -> None:
        """Ends all that is open, and lets the server become idle."""
        for number, told in self.told.items():
            if not told.done:
                self.server.end(number)
        for _ in range(2):
            self.server.step()

    def live(self, width: int, prompt: int = LIVE_PROMPT) -> list[Told]:
        """So many requests that decode, and will for long."""
        found = [self.submit(prompt, 1 << 11) for _ in range(width)]
        self.until(found, 1)
        for _ in range(SETTLE):
            self.step()
        return found


@dataclass(frozen=True)
class Mixed:
    """The mixed load: seconds, tokens a second, gaps and first tokens, computed for one asked."""

    seconds: float
    rate: float
    gaps: list[float]
    firsts: list[float]
    padding: float


def mixed(server: Server, width: int = WIDTH, requests: int = REQUESTS, seed: int = 1) -> Mixed:
    """As many requests in flight as told, each that ends followed by the next."""
    rng, run = random.Random(seed), Run(server)
    left = [(rng.randint(*PROMPTS), rng.randint(*OUTPUTS)) for _ in range(requests)]
    asked, room = server.computed()
    start, open_ = server.now(), 0
    while left or open_:
        while left and open_ < width:
            run.submit(*left.pop())
            open_ += 1
        open_ -= len(run.step())
    asked, room = server.computed()[0] - asked, server.computed()[1] - room
    took, all_ = server.now() - start, list(run.told.values())
    return Mixed(
        took,
        sum(t.out for t in all_) / took,
        [gap for t in all_ for gap in t.gaps()],
        [t.first for t in all_],
        room / asked - 1,
    )


@dataclass(frozen=True)
class Arrival:
    """A prompt that comes while others decode: the step without it, their gaps meanwhile, its first
    token, and what its launches' steps took."""

    idle: float
    gaps: list[float]
    first: float
    chunks: float
    launches: int

    @property
    def beyond(self) -> float:
        """Idle steps that the first token took beyond those which carried its prefill."""
        return (self.first - self.chunks) / self.idle


def arrival(run: Run, live: Sequence[Told], prompt: int) -> Arrival:
    """One prompt beside those alive."""
    for _ in range(SETTLE):
        run.step()
    idle = statistics.median(run.steps[-SETTLE:])
    before, at = run.server.computed()[0], len(run.steps)
    told = run.submit(prompt, 2)
    seen, carried = before, 0
    while not told.tokens:
        run.step()
        carried += (now := run.server.computed()[0]) > seen
        seen = now
    gaps = [gap for t in live for gap in t.gaps(told.at, told.tokens[0])]
    slow = sorted(run.steps[at:], reverse=True)[:carried]
    run.until([told])
    return Arrival(idle, gaps, told.first, sum(slow), carried)


def staggered(server: Server, width: int = WIDTH) -> tuple[float, float]:
    """Tokens a second of lockstep at this width, and of requests that came one after another."""
    rates = []
    for apart in (0, 3):
        run, several = Run(server), []
        for _ in range(width):
            several.append(run.submit(LIVE_PROMPT, 100 + apart * width))
            for _ in range(apart):
                run.step()
        run.until(several, 1)
        start, before = server.now(), sum(len(t.tokens) for t in several)
        for _ in range(60):
            run.step()
        rates.append((sum(len(t.tokens) for t in several) - before) / (server.now() - start))
        run.until(several)
    return rates[0], rates[1]


def bursts(server: Server, burst: int = BURST) -> list[float]:
    """Prompt tokens a second of each of ten bursts, one after the other."""
    rates = []
    for _ in range(BURSTS):
        run, start = Run(server), server.now()
        several = [run.submit(LIVE_PROMPT, 8) for _ in range(burst)]
        run.until(several, 1)
        rates.append(burst * LIVE_PROMPT / (server.now() - start))
        run.until(several)
    return rates


def share(values: Sequence[float], percent: float) -> float:
    """The value below which so many percent lie; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0


def line_of_mixed(name: str, m: Mixed) -> str:
    """One printed line."""
    gaps = " / ".join(f"{share(m.gaps, p) * 1e3:6.1f}" for p in (50, 90, 99))
    firsts = " / ".join(f"{share(m.firsts, p):5.2f}" for p in (50, 99))
    return (
        f"{name:12} {m.rate:7,.0f} tok/s in {m.seconds:5.1f} s, gaps {gaps} ms, first {firsts} s, "
        f"padding {m.padding:.1%}"
    )


def line_of_arrival(name: str, a: Arrival) -> str:
    """One printed line."""
    return (
        f"{name:12} idle step {a.idle * 1e3:5.1f} ms, gaps p50 {share(a.gaps, 50) * 1e3:5.1f}, "
        f"p99 {share(a.gaps, 99) * 1e3:5.1f}, most {max(a.gaps) * 1e3:5.1f} ms "
        f"({max(a.gaps) / a.idle:.1f}x); first token {a.first * 1e3:7.1f} ms = {a.launches} "
        f"chunks' steps {a.chunks * 1e3:7.1f} + {a.beyond:.1f} idle steps"
    )
