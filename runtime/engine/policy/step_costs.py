"""Microseconds of a launch by bucket: the build's table, corrected by what launches took.

A table measured launch by launch is too low where a whole step makes the card lower its clock.
"""

from collections.abc import Mapping

from spark_engine.runtime.executors.memory import BucketKey

RUN_WEIGHT = 0.25  # of the latest launch in its bucket's cost
RUN_RANGE = 2.0  # bounds a launch's influence: to cost / RUN_RANGE .. cost * RUN_RANGE


class StepCosts:
    """The step costs of an engine. `version` grows with every correction."""

    def __init__(self, table: Mapping[BucketKey, float]) -> None:
        self._table = dict(table)
        self._now = dict(table)
        self.version = 0

    def rows(self, family: str) -> list[int]:
        """The buckets of a family that have costs, ascending."""
        return sorted(rows for name, rows in self._table if name == family)

    def of(self, bucket: BucketKey) -> float:
        """Current estimate; 0 where the build has none."""
        return self._now.get(bucket, 0.0)

    def built(self, bucket: BucketKey) -> float:
        return self._table.get(bucket, 0.0)

    def ran(self, bucket: BucketKey, microseconds: float) -> None:
        if known := self.of(bucket):
            seen = min(max(microseconds, known / RUN_RANGE), known * RUN_RANGE)
            self._now[bucket] = known + RUN_WEIGHT * (seen - known)
            self.version += 1
