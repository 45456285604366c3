"""Tokenises in a few threads beside the event loop, and no more text than an engine can take.

Knows the tokenizer and how many tokens an engine holds. Knows no bodies and no engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from spark_engine.runtime.server.api.fields import too_long
from spark_engine.runtime.server.client import Busy
from spark_engine.runtime.text.tokenizer import Tokenizer

COMPOSED = 4  # a normaliser (NFC) makes one byte of at most this many
HEAD = 8  # characters per token in the first look at a long text; prose has 3 to 5
SLACK = 256  # tokens by which a text cut anywhere may count more than the whole
T = TypeVar("T")


class ThreadPool:
    """Runs work on text, `count` pieces at a time (the library lets go of Python's lock).

    All methods belong to one event loop.
    """

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, "text")
        self.pending = 0

    async def run(self, work: Callable[[], T], limit: int) -> T:
        """The result of `work`. Raises what it raises, and Busy where `limit` are pending."""
        if self.pending >= limit:
            raise Busy(f"the queue is full ({self.pending} prompts are still being read); retry")
        self.pending += 1
        future = asyncio.get_running_loop().run_in_executor(self._pool, work)
        future.add_done_callback(self._done)
        return await asyncio.shield(future)  # a caller that leaves does not stop the thread

    def close(self) -> None:
        """Drops what has not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _done(self, future: asyncio.Future[T]) -> None:
        self.pending -= 1
        if not future.cancelled():
            future.exception()  # looked at, also where nobody waits any more


def encode_within(tokenizer: Tokenizer, text: str, most: int) -> list[int]:
    """Token ids of `text`. Raises BadField where there are surely `most` or more, without
    tokenising all of it, and RequestError where it is not Unicode."""
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    longest = tokenizer.longest
    if size > most * longest * COMPOSED:
        raise too_long(f"{size} bytes, at most {longest} to a token", most)
    head = most * HEAD
    if len(text) > 2 * head and len(tokenizer.encode(text[:head])) > most + SLACK:
        raise too_long(f"the first {head} of {len(text)} characters are over {most} tokens", most)
    return tokenizer.encode(text)
