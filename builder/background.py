"""Work of a build that runs next to its other stages: in a thread, or in a process of its own.

Knows threads, processes and the clock; knows no weight.
"""

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from threading import Event

from spark_engine.builder.clock import StageClock
from spark_engine.errors import InternalError
from spark_engine.progress import Advance

SIGNAL_S = 0.1  # seconds after which a signal is heard
Work = Callable[[Advance, Event], None]  # reports its progress; ends early once the event is set


def _result(running: Future[None]) -> None:
    """Waits in short turns: Python hears a signal that comes as a wait begins only at its end."""
    while not wait((running,), SIGNAL_S).done:
        pass
    running.result()


@contextmanager
def in_background(
    work: Work, clock: StageClock, stage: str, now: bool, fork: bool = False
) -> Iterator[Callable[[], None]]:
    """Runs `work` in a thread; the function it gives waits for the end, and raises its error.
    `stage` shows its progress.

    If the block raises, the event is set, upon which `work` ends early. Unless `now`, `work` runs
    when the function is called: where host and GPU share their memory, tactics are timed in what
    the weights would take. With `fork` it runs in a process of its own: its threads then do not
    take the interpreter's lock from this one, in which tactics are timed.
    """
    stop, advance = Event(), clock.shown_in(stage)
    if not now:
        yield partial(work, advance, stop)
        return
    run = _forked(work, clock, advance) if fork else partial(work, advance)
    with ThreadPoolExecutor(1, "weights") as pool:
        try:  # a signal may come as soon as the work begins
            yield partial(_result, pool.submit(run, stop))
        except BaseException:
            stop.set()
            raise


def _forked(work: Work, clock: StageClock, advance: Advance) -> Callable[[Event], None]:
    """Starts `work` in a process; the function it gives waits for the end, and raises its error,
    or InternalError where the process was killed."""
    forked = multiprocessing.get_context("fork")  # recipes have functions that cannot be pickled
    ours, theirs = forked.Pipe(duplex=False)
    process = forked.Process(target=_report, args=(work, theirs), daemon=True)
    process.start()
    theirs.close()

    def followed(stop: Event) -> None:
        said: object = ()
        while isinstance(said, tuple):
            clock.look(process.pid)
            if said:
                advance(*said)
            if stop.is_set():
                process.kill()
            try:
                said = ours.recv() if ours.poll(SIGNAL_S) else ()
            except EOFError:
                process.join()
                said = InternalError(
                    f"the process that writes weights ended with exit code {process.exitcode}: "
                    "was it out of memory?"
                )
        process.join()
        if isinstance(said, BaseException):
            raise said

    return followed


def _report(work: Work, pipe: Connection) -> None:
    """Sends the progress of `work`, and at its end its error or None."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # this process's parent handles Ctrl-C
    try:
        work(lambda done, total: pipe.send((done, total)), Event())
    except BaseException as error:
        pipe.send(error)
    else:
        pipe.send(None)
