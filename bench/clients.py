"""Several client processes, so that the clients are not the bottleneck.

Knows processes and pipes; `client.py` is the work of one process.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from spark_engine.bench.client import run
from spark_engine.bench.load import Load
from spark_engine.bench.timings import ClientShare, Server
from spark_engine.errors import InternalError

GONE = "a client process ended; its messages are above"
LEAD_S = 0.3  # seconds between the message to the processes and the start


class Clients:
    """`count` processes that send requests to `server`, for several runs. A context manager."""

    def __init__(self, server: Server, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the processes inherit it
        self._dealt = context.Value("i", 0)  # scripts of the run that were started
        self._pipes: list[Connection] = []
        self._processes: list[SpawnProcess] = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, server, self._dealt), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        signal.signal(signal.SIGINT, previous)

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *raised: object) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()

    def run(self, load: Load) -> tuple[float, list[ClientShare]]:
        """Runs the load; returns its start time, and the record of each process.

        Raises InternalError when one of them fails.
        """
        self._dealt.value = 0
        timed = any(script.at_s is not None for script in load.scripts)
        widths = [1] * len(self._pipes) if timed else split(load.width, len(self._pipes))
        used = [(pipe, width) for pipe, width in zip(self._pipes, widths, strict=True) if width]
        for pipe, width in used:
            _send(pipe, (load, width))
        for pipe, _ in used:  # every process has read its load
            _receive(pipe)
        start = time.perf_counter() + LEAD_S
        for pipe, _ in used:
            _send(pipe, start)
        return start, [_receive(pipe) for pipe, _ in used]


def split(width: int, count: int) -> Sequence[int]:
    """`width` in `count` parts that differ by one at most."""
    return [width // count + (i < width % count) for i in range(count)]


def _send(pipe: Connection, what: object) -> None:
    try:
        pipe.send(what)
    except ConnectionError:
        raise InternalError(GONE) from None


def _receive(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except (EOFError, ConnectionError):
        raise InternalError(GONE) from None


def _work(pipe: Connection, server: Server, dealt: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process

    def following() -> int:
        with dealt.get_lock():
            dealt.value += 1
            return int(dealt.value) - 1

    while True:
        load, width = pipe.recv()
        gc.collect()
        gc.freeze()
        pipe.send(None)
        pipe.send(asyncio.run(run(server, load, following, width, pipe.recv())))
