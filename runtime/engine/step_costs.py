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
        self._table = dict(table)
        self._now = dict(table)
        self.version = 0

    def of(self, bucket: BucketKey) -> float:
        """What a launch takes now; 0 where the build did not say."""
        return self._now.get(bucket, 0.0)

    def built(self, bucket: BucketKey) -> float:
        """What the build said; 0 where it did not."""
        return self._table.get(bucket, 0.0)

    def ran(self, bucket: BucketKey, microseconds: float) -> None:
        """A launch of the bucket took so long; says nothing where the build did not."""
        if known := self.of(bucket):
            seen = min(max(microseconds, known / RUN_RANGE), known * RUN_RANGE)
            self._now[bucket] = known + RUN_WEIGHT * (seen - known)
            self.version += 1
