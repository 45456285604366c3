"""How long the callbacks of event loops take, in CPU time of their thread: what other work on the
machine adds is not counted. `tests/soak/attacks/launch.py` watches a server's process.
"""

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

LIMIT_S = 0.05  # of one callback of a server


@dataclass
class Longest:
    """The longest callback so far, in seconds, and what it was."""

    seconds: float = 0.0
    what: str = ""


@contextmanager
def watched() -> Iterator[Longest]:
    """Watches every loop of this process while the block runs. Garbage is not collected meanwhile:
    most of it is the tests' own."""
    longest, run = Longest(), asyncio.events.Handle._run  # type: ignore[attr-defined]

    def timed(handle: asyncio.Handle) -> None:
        begin = time.thread_time()
        try:
            run(handle)
        finally:
            took = time.thread_time() - begin
            if took > longest.seconds:
                longest.seconds, longest.what = took, repr(handle)[:300]

    collects = gc.isenabled()
    gc.disable()
    asyncio.events.Handle._run = timed  # type: ignore[attr-defined]
    try:
        yield longest
    finally:
        if collects:
            gc.enable()
        asyncio.events.Handle._run = run  # type: ignore[attr-defined]
