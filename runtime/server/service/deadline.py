"""Deadlines of a request: from its body to its last token, and in the queue."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from spark_engine.errors import CapacityError
from spark_engine.runtime.server.engine_client.client import Busy


class TimedOut(CapacityError):
    """The request took longer than the server allows."""


class QueuedTooLong(Busy):
    """The engine did not start the request in time."""

    code = "queue_timeout"


class Deadline:
    """`timeout_s` seconds from now for the whole request, `queue_s` until the engine starts it;
    None for no limit."""

    def __init__(self, timeout_s: float | None, queue_s: float | None = None) -> None:
        self.timeout_s, self.queue_s = timeout_s, queue_s
        self._start = time.monotonic()

    @contextlib.asynccontextmanager
    async def enforced(self) -> AsyncIterator[None]:
        """Cancels the block at the deadline and raises TimedOut."""
        try:
            async with asyncio.timeout(self._left(self.timeout_s)):
                yield
        except TimeoutError:
            words = f"the request took more than {self.timeout_s:g} s; send a shorter prompt"
            raise TimedOut(f"{words} or ask for fewer tokens") from None

    @contextlib.asynccontextmanager
    async def enforced_in_queue(self) -> AsyncIterator[None]:
        """The same before the engine has started; raises QueuedTooLong or TimedOut."""
        if self.queue_s is None or (self.timeout_s is not None and self.timeout_s < self.queue_s):
            async with self.enforced():
                yield
            return
        try:
            async with asyncio.timeout(self._left(self.queue_s)):
                yield
        except TimeoutError:
            words = f"the request waited for more than {self.queue_s:g} s in the queue; retry"
            raise QueuedTooLong(words) from None

    def _left(self, seconds: float | None) -> float | None:
        return None if seconds is None else self._start + seconds - time.monotonic()
