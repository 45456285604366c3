"""A `Service` in a thread of this process, for programs that have no event loop.

Knows threads and processes: the engine runs in a process, as for a server. Knows no request.
"""

import asyncio
import os
import threading
import weakref
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

from spark_engine.errors import OptionError, UserError
from spark_engine.runtime.offline.answering import Answering
from spark_engine.runtime.server.process.open_service import open_service, prepare
from spark_engine.runtime.server.process.options import ServerOptions

CLOSED = "this engine is closed: open another"
T = TypeVar("T")


class LLMClosed(UserError):
    """The engine was closed, also while a call waited for its answer."""


class ServiceThread:
    """Opens the engine in `folder`; `before` is put before the command of its process. To be used
    in a `with`, or closed; else it ends with its last reference, or with this process."""

    def __init__(self, folder: Path, options: ServerOptions, before: Sequence[str] = ()) -> None:
        """Waits until the engine is loaded. Raises EngineError, CapacityError or OptionError."""
        command, options = prepare(folder, options)
        self._pid, self._loop, self._stack = os.getpid(), asyncio.new_event_loop(), AsyncExitStack()
        self._jobs: set[asyncio.Task[Any]] = set()
        thread = threading.Thread(target=_run, args=(self._loop,), name="spark-llm", daemon=True)
        thread.start()
        parts = self._pid, self._loop, thread, self._stack, self._jobs
        self._end = weakref.finalize(self, _close, *parts)  # also at the interpreter's exit
        opening = open_service((*before, *command), folder, options)
        try:
            self.answering = Answering(wait(self.start(self._stack.enter_async_context(opening))))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "ServiceThread":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancels what runs, which then raises LLMClosed, and ends the engine. May be called
        twice."""
        self._end()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts it in the thread; cancelling the future ends it. May be called by any thread.
        Raises LLMClosed, and OptionError in a process that was forked off."""

        async def run() -> T:
            if not self._end.alive:
                work.close()
                raise LLMClosed(CLOSED)
            task = asyncio.current_task()
            assert task is not None
            self._jobs.add(task)
            try:
                return await work
            except asyncio.CancelledError:
                if not self._end.alive:
                    raise LLMClosed("closed before the answer was complete") from None
                raise
            finally:
                self._jobs.discard(task)

        running = run()
        try:
            if os.getpid() != self._pid:
                words = f"this engine was opened by process {self._pid}"
                raise OptionError(f"{words}: open one in this process, after the fork")
            return asyncio.run_coroutine_threadsafe(running, self._loop)
        except Exception as error:
            running.close()
            work.close()
            raise LLMClosed(CLOSED) if isinstance(error, RuntimeError) else error from None


def wait(future: Future[T]) -> T:
    """Its result; a caller that is interrupted ends it."""
    try:
        return future.result()
    finally:
        future.cancel()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.run_until_complete(asyncio.sleep(0))  # what was started meanwhile says that it is closed
    loop.close()


def _close(
    pid: int,
    loop: asyncio.AbstractEventLoop,
    thread: threading.Thread,
    stack: AsyncExitStack,
    jobs: set[asyncio.Task[Any]],
) -> None:
    """Ends work, processes and thread. In a process that was forked off nothing: they are not
    its."""
    if os.getpid() != pid:
        return

    async def end() -> None:
        for job in (waiting := list(jobs)):
            job.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await stack.aclose()

    if threading.current_thread() is thread:  # work that ended there had the last reference
        loop.create_task(end()).add_done_callback(lambda _: loop.stop())
        return
    asyncio.run_coroutine_threadsafe(end(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
