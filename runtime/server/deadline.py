"""How long one request may take, from its body to its last token."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from spark_engine.errors import CapacityError


class TimedOut(CapacityError):
    """The request took longer than the server allows."""


class Deadline:
    """`timeout_s` seconds from now; None for never."""

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self._end = None if timeout_s is None else time.monotonic() + timeout_s

    @contextlib.asynccontextmanager
    async def enforced(self) -> AsyncIterator[None]:
        """Ends what is awaited in the block when it is time, and raises TimedOut."""
        try:
            async with asyncio.timeout(None if self._end is None else self._end - time.monotonic()):
                yield
        except TimeoutError:
            words = f"the request took more than {self.timeout_s:g} s; send a shorter prompt"
            raise TimedOut(f"{words} or ask for fewer tokens") from None
