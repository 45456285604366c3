"""Progress of a rank's engine load. Rank 0's is aborted when another rank fails; another rank
reports its own to rank 0, which thereby knows that the rank does not hang.

Knows progress callbacks; knows neither ranks nor the loader.
"""

import math
import time
from collections.abc import Callable

from spark_engine.progress import Progress

REPORT_S = 1.0  # least time between two reports within one stage


class OpenProgress(Progress):
    """Calls `shown` and `mark` with the progress, and `check` before; `check` raises a failed
    rank's error, which ends the load."""

    def __init__(
        self, shown: Progress, mark: Callable[[str], None], check: Callable[[], None]
    ) -> None:
        super().__init__(None)
        self._inner, self._mark, self._check = shown, mark, check

    def mark(self, stage: str) -> None:
        self._check()
        self._mark(stage)

    def say(self, text: str) -> None:
        self._check()
        self._inner.say(text)

    def advance(self, done: int, total: int) -> None:
        self._check()
        self._inner.advance(done, total)


class ReportedProgress(Progress):
    """Passes each stage, and progress within it, to `tell`."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(None)
        self._tell, self._stage, self._reported_at = tell, "", -math.inf

    def mark(self, stage: str) -> None:
        self._tell(f"after {stage}")

    def say(self, text: str) -> None:
        self._stage = text
        self._tell(text)

    def advance(self, done: int, total: int) -> None:
        self._report(f"{self._stage}: {100 * done // max(total, 1)} %")

    def wait(self) -> None:
        """Reports that this rank waits for other ranks."""
        self._report("waiting for other ranks")

    def _report(self, text: str) -> None:
        now = time.monotonic()
        if now - self._reported_at >= REPORT_S:
            self._reported_at = now
            self._tell(text)
