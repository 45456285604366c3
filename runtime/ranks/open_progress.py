"""Progress of a rank's engine load: rank 0's aborts it as soon as another rank has failed, another
rank's is told to rank 0, which so knows that it does not hang.

Knows progress callbacks; knows neither ranks nor what is loaded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from spark_engine.progress import Progress

TOLD_S = 1.0  # at least, between two tellings of how far a stage is


class OpenProgress(Progress):
    """How far an opening is, as `shown` and `mark` are told, and `check` before it: raises what
    another rank has fallen of, so that nobody opens to the end what nobody will run."""

    def __init__(
        self, shown: Progress, mark: Callable[[str], None], check: Callable[[], None]
    ) -> None:
        super().__init__(None)
        self._inner, self._mark, self._check = shown, mark, check

    def mark(self, stage: str) -> None:
        """A stage has ended."""
        self._check()
        self._mark(stage)

    def say(self, text: str) -> None:
        """A stage begins."""
        self._check()
        self._inner.say(text)

    def advance(self, done: int, total: int) -> None:
        """How far the stage is; from several threads."""
        self._check()
        self._inner.advance(done, total)


class ToldProgress(Progress):
    """What an opening is at, as `tell` is told: each stage, and that it goes on within one."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(None)
        self._tell, self._stage, self._told_at = tell, "", -math.inf

    def mark(self, stage: str) -> None:
        """A stage has ended."""
        self._tell(f"after {stage}")

    def say(self, text: str) -> None:
        """A stage begins."""
        self._stage = text
        self._tell(text)

    def advance(self, done: int, total: int) -> None:
        """How far the stage is; from several threads."""
        self._go_on(f"{self._stage}: {100 * done // max(total, 1)} %")

    def wait(self) -> None:
        """It waits for other ranks."""
        self._go_on("waiting for other ranks")

    def _go_on(self, text: str) -> None:
        now = time.monotonic()
        if now - self._told_at >= TOLD_S:
            self._told_at = now
            self._tell(text)
