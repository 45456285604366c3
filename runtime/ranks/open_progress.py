"""Progress of rank 0's engine load, which aborts the load as soon as another rank has failed.

Knows progress callbacks; knows neither ranks nor what is loaded.
"""

from __future__ import annotations

from collections.abc import Callable

from spark_engine.progress import Progress


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
