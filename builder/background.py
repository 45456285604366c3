"""Work of a build that runs next to its other stages, in a forked process.

Knows processes and the clock; knows no weight.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import SynchronizedArray

from spark_engine.builder.clock import StageClock
from spark_engine.errors import InternalError

SIGNAL_S = 0.1  # seconds after which a signal is heard
Work = Callable[[StageClock], None]


@contextmanager
def in_background(work: Work, clock: StageClock, fork: bool) -> Iterator[Callable[[], None]]:
    """Runs `work`; the function it gives waits for the end, and raises its error, or InternalError
    where the process was killed. If the block raises, the process is killed.

    A process has another interpreter's lock and another memory map than the one that times tactics.
    Without `fork` the work runs when the function is called: where host and GPU share their memory,
    tactics are timed in what the weights would take.
    """
    if not fork:
        yield partial(work, clock)
        return
    forked = multiprocessing.get_context("fork")  # recipes have functions that cannot be pickled
    shown, (ours, theirs) = forked.Array("q", 2), forked.Pipe(duplex=False)
    process = forked.Process(target=_run, args=(work, clock, shown, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield partial(_result, ours, shown, clock)
    finally:
        process.kill()
        process.join()


def _result(pipe: Connection, shown: SynchronizedArray[int], clock: StageClock) -> None:
    while not pipe.poll(SIGNAL_S):
        if shown[1]:
            clock.advance(*shown[:])
    try:
        anonymous, clock.peak_of_process, error = pipe.recv()
    except EOFError:
        raise InternalError("the weights' process was killed: is memory left for it?") from None
    clock.peak_anonymous = max(clock.peak_anonymous, anonymous)
    if error is not None:
        raise error


def _run(work: Work, clock: StageClock, shown: SynchronizedArray[int], pipe: Connection) -> None:
    """In the process: sends the peaks of its memory, and the error or None."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    parent = multiprocessing.parent_process()

    def advance(done: int, total: int) -> None:
        shown[:] = [done, total]
        if parent is None or not parent.is_alive():
            raise InterruptedError("the build was killed")

    clock.advance, error = advance, None
    try:
        work(clock)
    except BaseException as raised:
        error = raised
    pipe.send((clock.peak_anonymous, clock.peak_rss(), error))
