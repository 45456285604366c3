"""Which stage is run when: the value of a stage, and what may run beside what.

Knows no process. `next_start` says what to begin now; the runner asks it again and again, and so
does `schedule`, which lets the known seconds pass without running anything.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.stages.machine import ROOT
from benchmarks.stages.table import Engine, Stage

RESULTS = ROOT / "benchmarks" / "results"
BUILDS = 2  # side by side, at most
LISTS = ("rows", "runs")  # where result files keep their rows
Behind = Callable[[str], int]  # how many commits a commit is behind the tree

# ---- value ---------------------------------------------------------------------------------------


def commits_behind(commit: str) -> int:
    """A commit that git does not know is further behind than all that it does."""
    command = ["git", "rev-list", "--count", f"{commit}..HEAD"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return 0
    return int(done.stdout) if done.returncode == 0 else 1 << 30


def made(stage: Stage, results: Path = RESULTS) -> tuple[str, str] | None:
    """Date and commit of the oldest of what is kept of a stage; None where something is missing."""
    found = []
    for name in stage.writes:
        path = results / name
        if not path.is_file():
            return None
        try:
            rows = [*_rows(json.loads(path.read_text()), stage.of)]
        except ValueError:  # not JSON: the row of the table says when it was last run
            rows = [("", "")]
        if not rows:
            return None
        found.append(min(rows))
    given = stage.last.partition(" ")
    known = [(date, commit) if date else (given[0], given[2]) for date, commit in found]
    return min(known, default=(given[0], given[2]) if stage.last else None)


def _rows(kept: Any, of: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    head = kept if isinstance(kept, dict) else {}
    lists = [head[name] for name in LISTS if name in head] or [kept if kept != head else [head]]
    for row in lists[0]:
        if all(({**head, **row}).get(key) == value for key, value in of.items()):
            yield tuple(str(row.get(key, head.get(key, ""))) for key in ("date", "commit"))  # type: ignore[misc]


def by_value(
    stages: Sequence[Stage], results: Path = RESULTS, behind: Behind = commits_behind
) -> list[Stage]:
    """Those without a result first, then those of the oldest; else as in the table. What needs no
    GPU comes last: a machine with one is not rented for it."""

    def key(stage: Stage) -> tuple[bool, bool, str, int]:
        known = made(stage, results)
        if known is None:
            return (not stage.gpus, False, "", 0)
        date, commit = known
        return (not stage.gpus, True, date, -behind(commit) if commit else -(1 << 30))

    return sorted(stages, key=key)


# ---- what may begin ------------------------------------------------------------------------------


@dataclass
class Running:
    """What runs. `alone`: nothing may begin beside it."""

    row: Stage | Engine
    began: float
    alone: bool
    gpus: tuple[str, ...] = ()

    def left(self, now: float) -> float:
        """Seconds that it is expected to take yet."""
        return max(self.began + self.row.seconds - now, 0.0)


@dataclass
class State:
    """`pending`: stages in their order; `built`: engines that are there; `lonely`: engines that are
    to be built with nothing beside them."""

    engines: Mapping[str, Engine]
    pending: list[Stage]
    built: set[str] = field(default_factory=set)
    running: list[Running] = field(default_factory=list)
    lonely: set[str] = field(default_factory=set)

    def missing(self, stage: Stage) -> list[Engine]:
        """The engines that a stage still waits for."""
        return [self.engines[name] for name in stage.engines if name not in self.built]

    def building(self, engine: Engine) -> Running | None:
        """The build of an engine, where it runs."""
        return next((r for r in self.running if r.row is engine), None)

    def wanted(self, stage: Stage, now: float) -> float:
        """Seconds until the stage would have ended, if it were next."""
        builds = [
            running.left(now) if (running := self.building(engine)) else engine.seconds
            for engine in self.missing(stage)
        ]
        return sum(builds) + stage.seconds


def next_start(state: State, jobs: int, now: float) -> Stage | Engine | None:
    """What to begin now beside what runs; None: wait.

    The first stage goes first. One that is timed has the machine to itself, so that nothing begins
    any more once it could; until then its engines are built, those of later stages beside them, and
    stages that are not timed: the first one, or what will not outlast the builds.
    """
    running = state.running
    if not state.pending or any(r.alone for r in running) or len(running) >= jobs:
        return None
    head = state.pending[0]
    if head.timed and not state.missing(head):
        return None if running else head
    builds = [r for r in running if isinstance(r.row, Engine)]
    spare = max((r.left(now) for r in builds), default=0.0)
    for stage in state.pending:
        missing = state.missing(stage)
        for engine in missing:
            free = len(builds) < BUILDS and state.building(engine) is None
            if free and not (engine.name in state.lonely and running):
                return engine
        if not missing and not stage.timed and (stage is head or stage.seconds <= spare):
            return stage
    return None


def alone(state: State, row: Stage | Engine) -> bool:
    """Whether nothing may begin beside it."""
    return row.timed if isinstance(row, Stage) else row.name in state.lonely


# ---- what would happen ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """`late`: there is no time for it."""

    row: Stage | Engine
    begin: float
    late: bool = False


def schedule(state: State, jobs: int, limit: float) -> list[Planned]:
    """What begins when, if everything takes the seconds that are known of it. Uses `state` up."""
    found: list[Planned] = []
    now = 0.0
    while state.pending or state.running:
        for stage in late(state, now, limit):
            state.pending.remove(stage)
            found.append(Planned(stage, now, late=True))
        row = next_start(state, jobs, now)
        if row is not None:
            found.append(Planned(row, now))
            state.running.append(Running(row, now, alone(state, row)))
            if isinstance(row, Stage):
                state.pending.remove(row)
            continue
        if not state.running:
            break
        first = min(state.running, key=lambda r: r.left(now))
        now += first.left(now)
        state.running.remove(first)
        if isinstance(first.row, Engine):
            state.built.add(first.row.name)
    return found


def late(state: State, now: float, limit: float) -> list[Stage]:
    """The stages for which no time is left."""
    return [stage for stage in state.pending if now + state.wanted(stage, now) > limit]
