"""Deadlines of a request: from its body to its last token, and in the queue."""

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
    async def enforced(self, queued: bool = False) -> AsyncIterator[None]:
        """Cancels the block at the deadline and raises TimedOut; `queued`: the engine has not
        started, so that the other deadline may come first and raise QueuedTooLong."""
        in_queue = self.queue_s if queued else None
        if in_queue is not None and self.timeout_s is not None and self.timeout_s < in_queue:
            in_queue = None
        most = self.timeout_s if in_queue is None else in_queue
        try:
            left = None if most is None else self._start + most - time.monotonic()
            async with asyncio.timeout(left):
                yield
        except TimeoutError:
            if in_queue is not None:
                words = f"the request waited for more than {in_queue:g} s in the queue; retry"
                raise QueuedTooLong(words) from None
            words = f"the request took more than {self.timeout_s:g} s; send a shorter prompt"
            raise TimedOut(f"{words} or ask for fewer tokens") from None
