"""What references say of greedy texts, read by a process of its own beside the other levels.

Float64 references take one core, and most of a check's time. Knows processes and engine folders;
judges nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path

from spark_engine.check.engines.open_engines import open_by_reference
from spark_engine.check.engines.prompts import Session
from spark_engine.check.texts.text import read_texts
from spark_engine.progress import Say
from spark_engine.runtime.engine.load import Loaded
from spark_engine.tensors import Array

Truths = Callable[[], Iterable[Array]]


@contextmanager
def texts_beside(
    reference: Loaded, folder: Path | None, session: Session, rows: int, say: Say
) -> Iterator[Truths]:
    """`read_texts` of the reference, begun now and had when what is yielded is called.

    `folder`: the engine whose references `reference` is. Without one, or on one core, they are read
    here, as they are asked for; and so they are where the process is killed, which `say` is told.
    Raises what reading them raises.
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


def _read(folder: Path, session: Session, rows: int) -> list[Array]:
    return [*read_texts(open_by_reference(folder), session, rows)]


def _result(
    pending: Future[list[Array]], reference: Loaded, session: Session, rows: int, say: Say
) -> Iterable[Array]:
    try:
        return pending.result()
    except BrokenProcessPool:
        say("the process that read the reference's texts was killed; they are read here instead")
        return read_texts(reference, session, rows)


def _end(pool: ProcessPoolExecutor) -> None:
    """Does not wait for what is left to be read: an error of another level may have come."""
    for process in (pool._processes or {}).values():  # Python 3.14 has `terminate_workers`
        process.terminate()
    pool.shutdown(cancel_futures=True)
