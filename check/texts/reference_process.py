"""Computes the references' greedy texts in a separate process, concurrently with the other levels.

Float64 references take one core, and most of a check's time. Knows processes and engine folders;
decides nothing.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path

from spark_engine.check.engines.open_engines import open_by_reference
from spark_engine.check.engines.prompts import CheckSession
from spark_engine.check.texts.text import read_texts
from spark_engine.progress import Say
from spark_engine.runtime.engine.load import Loaded
from spark_engine.tensors import Array

Truths = Callable[[], Iterable[Array]]


@contextmanager
def texts_in_process(
    reference: Loaded, folder: Path | None, session: CheckSession, rows: int, say: Say
) -> Iterator[Truths]:
    """Starts `read_texts` of the reference; yields a function that returns its result.

    `folder`: the engine that `reference` computes by references. Without one, or on one core, the
        texts are computed in this process when the function is called; also if the other process is
        killed, which `say` receives. Raises the errors of `read_texts`.
    """
    if folder is None or len(os.sched_getaffinity(0)) == 1:
        yield lambda: read_texts(reference, session, rows)
        return
    ignored = (signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends this process, which ends that one
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(1, spawn, signal.signal, ignored)
    try:
        pending = pool.submit(_read, folder, session, rows)
        yield lambda: _result(pending, reference, session, rows, say)
    finally:
        _end(pool)


def _read(folder: Path, session: CheckSession, rows: int) -> list[Array]:
    return [*read_texts(open_by_reference(folder), session, rows)]


def _result(
    pending: Future[list[Array]], reference: Loaded, session: CheckSession, rows: int, say: Say
) -> Iterable[Array]:
    try:
        return pending.result()
    except BrokenProcessPool:
        say("the process that read the reference's texts was killed; they are read here instead")
        return read_texts(reference, session, rows)


def _end(pool: ProcessPoolExecutor) -> None:
    """Does not wait for the remaining texts, since another level may have raised an error."""
    for process in (pool._processes or {}).values():  # Python 3.14 has `terminate_workers`
        process.terminate()
    pool.shutdown(cancel_futures=True)
