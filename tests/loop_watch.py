"""How long the callbacks of event loops take, in CPU time of their thread: what other work on the
machine adds is not counted.

`python -m tests.loop_watch FILE MODULE ARGUMENTS…` runs a module, for instance a server, and adds a
line of JSON to FILE for each callback over the limit.
"""

from __future__ import annotations

import asyncio
import gc
import json
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 0.05  # of one callback of a server


@dataclass
class Longest:
    """The longest callback so far, in seconds, and what it was."""

    seconds: float = 0.0
    what: str = ""


@contextmanager
def watched(slow: Callable[[float, str], None] | None = None) -> Iterator[Longest]:
    """Watches every loop of this process while the block runs. `slow` gets the seconds of each
    callback over the limit, and what it was. Garbage is not collected meanwhile: most of it is the
    tests' own."""
    longest, run = Longest(), asyncio.events.Handle._run  # type: ignore[attr-defined]

    def timed(handle: asyncio.Handle) -> None:
        begin = time.thread_time()
        try:
            run(handle)
        finally:
            took = time.thread_time() - begin
            if slow is not None and took > LIMIT_S:
                slow(took, repr(handle)[:300])
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


def _main() -> None:
    file, module, *arguments = sys.argv[1:]
    sys.argv = [module, *arguments]

    def note(took: float, what: str) -> None:
        with Path(file).open("a") as log:
            log.write(json.dumps({"seconds": took, "callback": what}) + "\n")

    with watched(note):
        gc.enable()
        runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    _main()
