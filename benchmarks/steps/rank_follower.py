"""A rank's process that also queues a bucket's launches one by one when rank 0 does.

    python -m benchmarks.steps.rank_follower SPEC    instead of runtime.cli.rank_process

Sums wait for their peers, so that rank 0 cannot time launches alone. Rank 0 sends family and rows
of the bucket among the tables (`ask`).
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.steps.time_queue import time_launches
from spark_engine.engine_file import read_engine, read_manifest
from spark_engine.runtime.cli import rank_process
from spark_engine.runtime.executors.executor import Executor
from spark_engine.runtime.executors.memory import BucketKey
from spark_engine.runtime.ranks import spawn
from spark_engine.runtime.ranks.follower import Follower
from spark_engine.runtime.ranks.messages import Table, Tables
from spark_engine.runtime.ranks.spawn import RankSpec

MODULE = "benchmarks.steps.rank_follower"
SPLIT = "split.bucket"  # the name of the table that carries the bucket


def use() -> None:
    """Ranks that this process starts from here on run this module."""
    root = str(Path(__file__).parents[2])
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = root if known is None else os.pathsep.join([known, root])
    spawn.MODULE = MODULE


def ask(store: Any, family: str, rows: int) -> None:
    """Makes every other rank queue the bucket's launches now; `store` is rank 0's."""
    store._orders.add(Tables([Table(SPLIT, [rows], family.encode())]))
    store._orders.send()


class SplitFollower(Follower):
    """A rank's replay, which also queues a bucket's launches one by one."""

    def __init__(self, executors: Mapping[BucketKey, Executor], *rest: Any) -> None:
        super().__init__(executors, *rest)
        self._native: Mapping[BucketKey, Any] = executors
        self._engine = Path(msgspec.json.decode(sys.argv[1], type=RankSpec).engine)

    def _write(self, order: Tables) -> None:
        super()._write(Tables([row for row in order.tables if row.name != SPLIT]))
        for row in order.tables:
            if row.name == SPLIT:
                self.memory.flush()
                self._split(row.data.decode(), row.slots[0])

    def _split(self, family: str, rows: int) -> None:
        buckets = read_manifest(self._engine).buckets
        file = next(b.file for b in buckets if (b.family, b.rows) == (family, rows))
        time_launches(self._native[family, rows], read_engine(self._engine / file).payload)


def main() -> int:
    rank_process.Follower = SplitFollower  # type: ignore[misc]
    return rank_process.main()


if __name__ == "__main__":
    sys.exit(main())
