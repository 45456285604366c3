"""A rank's process whose rounds are forced too: `forced_drafts`, for engines of several ranks.

    python -m benchmarks.forced_rank SPEC        instead of spark_engine.runtime.cli.rank_process

Rank 0 tells what is forced among the tables, in the order of launches, so that every rank's states
say the same ahead of a round.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.forced_drafts import PATHS, PLACE, Forcing, Paths
from spark_engine.interface import PREFILL
from spark_engine.runtime.cli import rank_process
from spark_engine.runtime.executors.executor import Executor
from spark_engine.runtime.executors.memory import BucketKey
from spark_engine.runtime.ranks import spawn
from spark_engine.runtime.ranks.follower import Follower
from spark_engine.runtime.ranks.messages import Table, Tables

MODULE = "benchmarks.forced_rank"


def use() -> None:
    """Ranks that this process starts from here on are such."""
    root = str(Path(__file__).parents[1])
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = root if known is None else os.pathsep.join([root, known])
    spawn.MODULE = MODULE


class ForcedFollower(Follower):
    """A rank's replay, in which rounds are forced."""

    def __init__(self, executors: Mapping[BucketKey, Executor], *rest: Any) -> None:
        hooked = {key: Hooked(one, key[0], self._before) for key, one in executors.items()}
        super().__init__(hooked, *rest)
        self._store: Any = rest[2]
        self._one: Any = next(iter(executors.values()))
        self._forcing: Forcing | None = None
        if self._store is not None:  # while nobody waits for a step
            for name in ("benchmarks.graphs", "spark_engine.builder.native.nvrtc"):
                import_module(name)

    def _write(self, order: Tables) -> None:
        for row in order.tables:
            if row.name == PATHS:
                self._heed(row)
            elif row.name == PLACE:
                assert self._forcing is not None
                self._forcing.place(*row.slots)
        rest = [row for row in order.tables if row.name not in (PATHS, PLACE)]
        super()._write(Tables(rest))

    def _heed(self, row: Table) -> None:
        paths = Paths.decode(row.data)
        if self._forcing is None:
            gpu = None if self._store is None else self._one.gpu
            states = self.memory.states if self._store is None else self._store.addresses
            self._forcing = Forcing(paths, states, row.slots[0], gpu)
        self._forcing.paths = paths
        self._forcing.send()

    def _before(self, family: str) -> None:
        forcing = self._forcing
        if family != PREFILL and forcing is not None and (forcing.paths.firsts >= 0).any():
            forcing.go()


class Hooked:
    """An executor that calls `before` with its family ahead of every launch."""

    def __init__(self, inner: Executor, family: str, before: Callable[[str], None]) -> None:
        self._inner, self._family, self._before = inner, family, before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def launch(self, buffers: Any) -> Any:
        """Forces, and launches."""
        self._before(self._family)
        return self._inner.launch(buffers)


def main() -> int:
    """Runs the rank."""
    rank_process.Follower = ForcedFollower  # type: ignore[misc]
    return rank_process.main()


if __name__ == "__main__":
    sys.exit(main())
