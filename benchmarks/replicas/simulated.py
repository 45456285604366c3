"""Many replicas simulated: rates, first tokens and hits of the prefix cache, by routing policy.

`python -m benchmarks.replicas.simulated [--replicas 1,2,4,16,64,256,1000] [--longer 16] [--out
FILE]` runs the front's own router (`runtime/replicas/routing.py`) over simulated replicas: steps
and prefill take what `benchmarks/results/decode/decode_h200.json` has of the 35B on one H200, a
prefix cache holds `--cache` tokens and forgets the longest unused. The load is the recorded agent
trace (`bench/agent.json`): `--agents` of them at each replica, each a separate conversation after
the same system message and tools, with the recorded pauses; `--longer` multiplies its texts. A
token is four bytes. The front's own time is not in it.
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.result_files import RESULTS, ROOT
from spark_engine.bench import replay
from spark_engine.runtime.replicas.prompt_digests import Place, places
from spark_engine.runtime.replicas.routing import Policy, Router, Ticket

TRACE, STEPS = ROOT / "bench" / "agent.json", RESULTS / "decode" / "decode_h200.json"
MODEL = "qwen36-35b-a3b"
BYTES = 4  # of a text for a token
STRIDE = 8  # decode steps that are computed at once
SLOTS = 128  # sequences of a replica


@dataclass(frozen=True)
class Costs:
    """Seconds of a decode step by rows, and prefilled tokens a second."""

    steps: tuple[tuple[int, float], ...]
    prefill: float

    def step(self, rows: int) -> float:
        """Between the measured rows it is a straight line."""
        before = (0, self.steps[0][1])
        for row, seconds in self.steps:
            if rows <= row:
                share = (rows - before[0]) / (row - before[0])
                return before[1] + share * (seconds - before[1])
            before = (row, seconds)
        return self.steps[-1][1] * rows / self.steps[-1][0]


def measured(path: Path = STEPS, model: str = MODEL) -> Costs:
    """What was measured, at a context of 1,024 tokens."""
    rows = [r for r in json.loads(path.read_text())["rows"] if r["model"] == model]
    rows = sorted((r for r in rows if r["ctx"] == 1024), key=lambda r: int(r["npl"]))
    steps = {int(r["npl"]): float(r["step_ms"]) / 1e3 for r in rows}
    return Costs(tuple(steps.items()), float(rows[-1]["prefill_tok_s"]))


@dataclass(frozen=True)
class Turn:
    """One request: the places of its prompt, tokens of its answer, seconds before it."""

    prompt: tuple[Place, ...]
    out: int
    pause: float

    @property
    def tokens(self) -> int:
        return self.prompt[-1].length // BYTES


def conversation(row: dict[str, Any], name: str, longer: int) -> tuple[Turn, ...]:
    """The recorded conversation as a stranger would have had it: its first question is its own."""
    messages: list[dict[str, Any]] = []
    found, pause, asked = [], 0.0, False
    for message in row["messages"]:
        plain = {k: v for k, v in message.items() if k not in replay.OWN}
        if isinstance(plain.get("content"), str):
            plain["content"] *= longer
        if message["role"] == "user" and not asked:
            plain["content"], asked = f"{name}: {plain['content']}", True
        if message["role"] == "assistant":
            body = {"model": "m", "tools": row.get("tools"), "messages": messages}
            found.append(Turn(places([json.dumps(body).encode()]), message["max_tokens"], pause))
            pause = 0.0
        else:
            pause += message.get("pause_s", 0.0)
        messages.append(plain)
    return tuple(found)


@dataclass
class Job:
    """A request at a replica; times in seconds."""

    agent: int
    turn: Turn
    ticket: Ticket
    at: float
    left: int = 0


@dataclass
class Replica:
    """One engine: prefill in the order of arrival, decode between prefills in strides."""

    costs: Costs
    cache_bytes: int  # bytes of prompts that its cache holds
    free: float = 0.0  # when it may begin with the next stride
    waiting: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)
    cache: OrderedDict[bytes, int] = field(default_factory=OrderedDict)  # by place: its own bytes
    held: int = 0
    busy: bool = False

    def hit(self, prompt: Sequence[Place]) -> int:
        """Bytes of a prompt that it needs not compute; it holds all of it afterwards."""
        shared, before = 0, 0
        for place in prompt[:-1]:  # the last token is always computed
            if place.digest not in self.cache:
                break
            shared = place.length
        for place in prompt:
            if place.digest not in self.cache:
                self.cache[place.digest] = place.length - before
                self.held += place.length - before
            before = place.length
        for place in reversed(prompt):
            self.cache.move_to_end(place.digest)
        while self.held > self.cache_bytes:
            self.held -= self.cache.popitem(last=False)[1]
        return shared


class World:
    """All replicas, their router, and agents that ask in turn."""

    def __init__(self, policy: Policy, replicas: int, load: Load, seconds: float) -> None:
        self.router = Router(policy)
        self.names = [f"r{i}" for i in range(replicas)]
        for name in self.names:
            self.router.add(name)
        cache_bytes = load.cache * BYTES
        self.replicas = {name: Replica(load.costs, cache_bytes) for name in self.names}
        self.load, self.seconds = load, seconds
        self.events: list[tuple[float, int, str, Any]] = []
        self._count = 0
        self.asked = self.hits = self.out = 0
        self.firsts: list[float] = []
        self.turns: list[deque[Turn]] = []
        for agent in range(load.agents * replicas):
            self.turns.append(deque())
            # they begin one after another, over the time that a conversation takes
            self._later(load.spread * agent / (load.agents * replicas), "ask", agent)

    def _later(self, at: float, what: str, subject: Any) -> None:
        self._count += 1
        heapq.heappush(self.events, (at, self._count, what, subject))

    def run(self) -> dict[str, float]:
        """The figures of the second half, by name."""
        half = self.seconds / 2
        before: tuple[int, int, int] | None = None
        while self.events and self.events[0][0] < self.seconds:
            at, _, what, subject = heapq.heappop(self.events)
            if before is None and at >= half:
                before, self.firsts = (self.asked, self.hits, self.out), []
            if what == "ask":
                self._ask(at, subject)
            else:
                self._stride(at, subject)
        asked, hits, out = before or (0, 0, 0)
        firsts = sorted(self.firsts)
        return {
            "tokens_per_s": (self.out - out) / half,
            "hit_rate": (self.hits - hits) / max(1, self.asked - asked),
            "first_ms": 1e3 * statistics.median(firsts),
            "first_p99_ms": 1e3 * firsts[int(0.99 * (len(firsts) - 1))],
        }

    def _ask(self, at: float, agent: int) -> None:
        if not self.turns[agent]:
            name = f"{agent} at {at:.3f}"
            self.turns[agent].extend(conversation(self.load.row, name, self.load.longer))
        turn = self.turns[agent].popleft()
        choice = self.router.choose(turn.prompt)
        assert choice is not None
        ticket = self.router.begin(choice, turn.prompt)
        replica = self.replicas[choice.name]
        replica.waiting.append(Job(agent, turn, ticket, at, turn.out))
        if not replica.busy:
            replica.busy = True
            self._later(max(at, replica.free), "stride", choice.name)

    def _stride(self, at: float, name: str) -> None:
        """A prefill, if one waits, and some decode steps."""
        replica, now = self.replicas[name], at
        if replica.waiting and len(replica.running) < SLOTS:
            job = replica.waiting.popleft()
            shared = replica.hit(job.turn.prompt) // BYTES
            self.asked += job.turn.tokens
            self.hits += shared
            now += (job.turn.tokens - shared) / self.load.costs.prefill
            now += self.load.costs.step(1)
            job.left -= 1
            self.out += 1
            self.router.started(job.ticket)
            self.firsts.append(now - job.at)
            replica.running.append(job)
        rows = replica.running
        steps = min([STRIDE, *(job.left for job in rows)]) if rows else 0
        if replica.waiting and len(rows) < SLOTS:
            steps = min(steps, 1)
        now += steps * self.load.costs.step(len(rows))
        for job in rows:
            job.left -= steps
        self.out += steps * len(rows)
        for job in [job for job in rows if job.left <= 0]:
            rows.remove(job)
            self.router.end(job.ticket)
            following = self.turns[job.agent]
            self._later(now + (following[0].pause if following else 1.0), "ask", job.agent)
        replica.free = now
        replica.busy = bool(rows or replica.waiting)
        if replica.busy:
            self._later(now, "stride", name)


@dataclass(frozen=True)
class Load:
    """The requests, and the replicas that get them."""

    row: dict[str, Any]
    costs: Costs
    agents: int
    longer: int
    cache: int
    spread: float = 8.0  # seconds in which the agents begin


def table(sizes: Sequence[int], load: Load, seconds: float) -> Iterator[dict[str, Any]]:
    """A row for each number of replicas and policy."""
    alone: dict[str, float] = {}
    for count in sizes:
        for policy in Policy:
            row = World(policy, count, load, seconds).run()
            each = alone.setdefault(policy.value, row["tokens_per_s"] / count)
            growth = row["tokens_per_s"] / (each * count)
            found = {k: round(v, 4) for k, v in row.items()}
            yield {"replicas": count, "policy": policy.value, **found, "of_n": round(growth, 3)}
            print(
                f"{count:5} {policy.value:7} {row['tokens_per_s']:11,.0f} tokens/s "
                f"({growth:.3f} x N), hits {row['hit_rate']:6.1%}, first token "
                f"{row['first_ms']:7.1f} / {row['first_p99_ms']:7.1f} ms",
                flush=True,
            )


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--replicas", default="1,2,4,16,64,256,1000")
    parser.add_argument("--agents", type=int, default=64, help="at each replica")
    parser.add_argument("--longer", type=int, default=1)
    parser.add_argument("--cache", type=int, default=2_000_000, help="tokens")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(words)
    (row,) = replay.read(TRACE)
    load = Load(row, measured(), args.agents, args.longer, args.cache)
    sizes = [int(n) for n in args.replicas.split(",")]
    given = {k: v for k, v in vars(args).items() if k != "out"}
    rows = []
    for row in table(sizes, load, args.seconds):
        rows.append(row)
        if args.out:  # as they come: the largest take long
            args.out.write_text(json.dumps({"options": given, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
