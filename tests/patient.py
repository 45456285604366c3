"""Waits of up to a minute or two: a busy machine may take longer than a library's own limits."""

import asyncio
import time
from collections.abc import Callable
from functools import partial

import httpx

WAIT_S = 60.0
get = partial(httpx.get, timeout=WAIT_S)
post = partial(httpx.post, timeout=WAIT_S)


async def until(ok: Callable[[], object], seconds: float = 90.0) -> None:
    """Raises AssertionError where it does not come true."""
    end = time.monotonic() + seconds
    while not ok():
        assert time.monotonic() < end
        await asyncio.sleep(0.005)


def wait(ok: Callable[[], object], what: str = "", seconds: float = 90.0) -> None:
    """The same without an event loop."""
    end = time.monotonic() + seconds
    while not ok():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.02)
