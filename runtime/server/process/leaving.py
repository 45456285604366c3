"""Ends the server's process even if a thread or the event loop does not end."""

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

PATIENCE_S = 1.0  # for threads that end soon
THREADS = 4
log = logging.getLogger(__name__)


def run(work: Coroutine[Any, Any, int]) -> int:
    """Runs `work` in an event loop and returns its exit code. If threads still run after it, the
    process ends here, with that code."""
    return asyncio.run(_run(work))


async def _run(work: Coroutine[Any, Any, int]) -> int:
    executor = ThreadPoolExecutor(THREADS, "other")  # of `asyncio.to_thread`
    asyncio.get_running_loop().set_default_executor(executor)
    code = await work
    executor.shutdown(wait=False, cancel_futures=True)  # its idle threads end
    end = time.monotonic() + PATIENCE_S
    for thread in _others():
        thread.join(max(0.0, end - time.monotonic()))
    if left := [thread.name for thread in _others()]:
        log.warning("threads do not end (%s): the process ends without them", ", ".join(left))
        leave(code)
    return code


def leave(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def leave_later(seconds: float, code: Callable[[], int]) -> None:
    """Ends the process after `seconds`, if it still runs: its event loop, or a task, does not
    end."""

    def end() -> None:
        log.error(
            "the server did not end within %.0f s of the signal: the process ends now", seconds
        )
        leave(code())

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def _others() -> list[threading.Thread]:
    """Threads that the interpreter would wait for at exit."""
    own = threading.current_thread()
    return [t for t in threading.enumerate() if t is not own and not t.daemon]
