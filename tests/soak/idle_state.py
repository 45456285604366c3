"""What must hold when a server is idle: whole pools, no growth of descriptors or memory.

Knows dumps and /proc; knows no HTTP.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.soak.attacks.processes import family

WARM = 3  # quiet points of a process before its memory must have settled
GROWTH_MB = 24.0  # beyond that, over all later quiet points
DESCRIPTORS = 4  # more than at the first quiet point
PROCESSES = 2  # the same: one of those that read prompts may be ending while the next begins


def read_dump(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(engine process's state, HTTP process's) of a dump."""
    lines = path.read_text().splitlines()
    places = [lines.index(f"== {name} process: state ==") + 1 for name in ("engine", "HTTP")]
    engine, http = (json.loads(lines[i]) for i in places)
    path.unlink()
    return engine, http


def check_state(engine: dict[str, Any], http: dict[str, Any]) -> list[str]:
    wrong = []
    for pool in engine["pools"]:
        cached = pool["kept_by_the_cache_alone"]
        if pool["name"] == "snapshot":
            cached = engine["stats"]["snapshots"]
        if pool["free"] + cached != pool["size"]:
            wrong.append(f"a {pool['name']} is missing: {pool}, {cached} are the cache's")
    held = [k for k in ("swap_bytes", "running", "waiting", "launched", "sequences") if engine[k]]
    wrong += [f"the engine still holds {k}: {engine[k]}" for k in held]
    if http["engine_client"]["in_flight"]:
        wrong.append(f"the HTTP process still holds {http['engine_client']}")
    return wrong


@dataclass
class Life:
    """One process: memory in MB and descriptors at its quiet points."""

    name: str
    memory: list[float] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    def look(self, pid: int, cached_mb: float) -> None:
        """The prefix cache fills within its budget: only memory beyond it can leak."""
        rows = Path(f"/proc/{pid}/status").read_text().splitlines()
        kb = next(int(row.split()[1]) for row in rows if row.startswith("VmRSS"))
        self.memory.append(kb * 1024 / 1e6 - cached_mb)
        self.descriptors.append(len(os.listdir(f"/proc/{pid}/fd")))

    def growth(self) -> float:
        """MB from when it was warm to the end, by the medians of the first and the last three."""
        warm = self.memory[WARM:]
        if len(warm) < 6:
            return 0.0
        return sorted(warm[-3:])[1] - sorted(warm[:3])[1]


class Books:
    def __init__(self) -> None:
        self.lives: dict[int, Life] = {}
        self.descendants = 0  # processes at the first quiet point

    def begin(self, server: int, engine: int | None) -> None:
        """Processes that may be new."""
        self.lives.setdefault(server, Life("server"))
        if engine is not None:
            self.lives.setdefault(engine, Life("engine"))

    def enter(self, server: int, engine: int | None, cached_mb: float) -> list[str]:
        """A quiet point; what is wrong at once. `cached_mb`: held by the engine's prefix cache."""
        wrong = []
        for pid in (server, engine):
            if pid is None or pid not in self.lives:
                wrong.append(f"process {pid} is not one that was started")
                continue
            life = self.lives[pid]
            life.look(pid, cached_mb if pid == engine else 0.0)
            # Workers start with their first task: an earlier process may have needed more.
            now, lives = life.descriptors[-1], self.lives.values()
            earlier = [one for one in lives if one.name == life.name and one is not life]
            known = max([life.descriptors[0], *(n for one in earlier for n in one.descriptors)])
            if now > known + DESCRIPTORS:
                wrong.append(f"the {life.name} has {now} descriptors open, and had {known}")
        descendants = len(family(server))
        self.descendants = self.descendants or descendants
        if descendants > self.descendants + PROCESSES:
            wrong.append(f"the server has {descendants} processes, and had {self.descendants}")
        return wrong

    def line(self) -> str:
        rows = [life for life in self.lives.values() if life.memory][-4:]
        return "; ".join(f"{r.name} {r.memory[-1]:.0f} MB {r.descriptors[-1]} fd" for r in rows)

    def verdict(self) -> list[str]:
        for life in self.lives.values():
            print(f"{life.name}: MB {[round(m) for m in life.memory]}, fd {life.descriptors}")
        grown = {pid: life.growth() for pid, life in self.lives.items()}
        return [
            f"the {self.lives[pid].name} {pid} grew by {mb:.0f} MB: {self.lives[pid].memory}"
            for pid, mb in grown.items()
            if mb > GROWTH_MB
        ]
