"""Event loops on a test's own clock: no deadline passes because the machine is busy."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class StandingLoop(asyncio.SelectorEventLoop):
    """Sockets are real; time is what `now` says."""

    now = 0.0

    def time(self) -> float:
        return self.now


class LeapingLoop(StandingLoop):
    """Where nothing else is to be done, the time of the next timer comes at once. For what has
    neither threads nor sockets, which the loop would not wait for."""

    def __init__(self) -> None:
        self._found = _Selector()
        self._found.loop = self
        super().__init__(self._found)


class _Selector(selectors.DefaultSelector):
    loop: LeapingLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(None if timeout is None else 0)
        if not found and timeout:
            self.loop.now += timeout
        return found


def leap(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on a LeapingLoop."""
    with asyncio.Runner(loop_factory=LeapingLoop) as runner:
        return runner.run(work)
