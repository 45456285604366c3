"""Microseconds of a launch by bucket: the build's table, corrected by what launches took.

A table made of launches one by one is too low where a whole step makes the card lower its clock.
Knows buckets; who asks knows what to do with them.
"""

from __future__ import annotations

from collections.abc import Mapping

from spark_engine.runtime.executors.memory import BucketKey

RUN_WEIGHT = 0.25  # of the latest launch in its bucket's cost
RUN_RANGE = 2.0  # a launch counts as at most so many times the cost so far, or a share of it


class StepCosts:
    """One engine's. `version` grows with every correction."""

    def __init__(self, table: Mapping[BucketKey, float]) -> None:
        self._table = {bucket: cost for bucket, cost in table.items() if cost > 0}
        self._now = dict(self._table)
        self._measured: set[BucketKey] = set()
        self.version = 0

    def of(self, bucket: BucketKey) -> float:
        """By the table or by what ran; 0 where neither says."""
        return self._now.get(bucket, 0.0)

    def built(self, bucket: BucketKey) -> float:
        """By the table; 0 where it is silent."""
        return self._table.get(bucket, 0.0)

    def measured(self, bucket: BucketKey) -> bool:
        """Whether a launch of it was timed."""
        return bucket in self._measured

    def ran(self, bucket: BucketKey, microseconds: float) -> None:
        """A launch of the bucket took so long."""
        self._measured.add(bucket)
        known = self._now.get(bucket, microseconds)
        seen = min(max(microseconds, known / RUN_RANGE), known * RUN_RANGE)
        self._now[bucket] = known + RUN_WEIGHT * (seen - known)
        self.version += 1
