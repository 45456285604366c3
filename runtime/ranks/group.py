"""Rank 0's view of the other ranks: sends them packets, detects their failure, shuts them down.

Knows sockets, processes and time; knows no executor. A thread listens to all of them: when one has
fallen, every call between ranks ends at once, and with it rank 0's step. Where rank 0 itself waits
for a device that waits for the fallen one, nothing but its own end helps. Time in which rank 0
itself did not run is nobody's fault, and does not count.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Mapping

import msgspec

from spark_engine.errors import CapacityError, EngineError, ExecutorError, SparkError
from spark_engine.runtime.ranks.channel import Ring, Sender, read_answer
from spark_engine.runtime.ranks.communicator import Communicator
from spark_engine.runtime.ranks.links import LIMIT_S
from spark_engine.runtime.ranks.messages import (
    Begin,
    Leave,
    Opening,
    RankFailed,
    decode_answer,
    encode,
)
from spark_engine.runtime.ranks.running_clock import TICK_S, RunningClock

QUIET_S = 300.0  # of a rank that opens its part: longer than its longest step on a slow disk that
# many ranks read at once, and than NCCL waits to be connected (runtime/executors/nccl.py)
LAST_WORDS_S = 0.5  # for what a fallen rank says of itself
DEVICE_S = 6.0  # a step on a device; a chunk of prefill takes a second
GRACE_S = 2.0  # rank 0 gets this long to leave a step that cannot end; with DEVICE_S less than the
# server's watchdog, so that the log names the rank
OPENING_S = 30.0  # and this long to leave an opening that may wait for others on a device
EXIT_S = 5.0  # and the others to close
KILLED_S = 1.0  # or less, where one has fallen or still opens its part, and does not listen
EXIT_CODE = 70  # of a rank 0 that could not leave its step
log = logging.getLogger(__name__)


class Group:
    """The other ranks. `controls` are rank 0's sockets to them, `processes` those that it has
    started itself. `limit_s`: of a call between ranks, once
    all are open. All methods but the watching thread's belong to one thread."""

    def __init__(
        self,
        comm: Communicator,
        controls: Mapping[int, socket.socket],
        processes: Mapping[int, subprocess.Popen[bytes]],
        ring: Ring | None = None,
        limit_s: float = LIMIT_S,
    ) -> None:
        self.comm = comm
        self.limit_s = limit_s
        self._controls, self._processes = dict(controls), dict(processes)
        self._sender = Sender(controls, ring, limit_s)
        self._opened: set[int] = set()
        self._news: dict[int, tuple[float, str]] = {}  # by rank: when it said what it is at
        self._fallen: SparkError | None = None
        self._fell_at = 0.0
        self._heard = threading.Condition()
        self._waits_since: float | None = None
        self._opening = False
        self._closing = self._closed = False
        self._clock = RunningClock()  # the watching thread's
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    @property
    def pids(self) -> dict[int, int]:
        """Processes of the ranks that run on this host."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def begin(self, begin: Begin, device: bool) -> None:
        """Tells all ranks to open the engine, as this one does meanwhile: on a `device` that may
        wait for a fallen rank without end. Elsewhere it leaves by `check`, however slow it is. Who
        says nothing for QUIET_S has fallen; who waits for another says that."""
        self.comm.limit_s, self._opening = math.inf, device
        self._news = {rank: (self._clock.last, "its process starts") for rank in self._controls}
        self.send(encode(begin))

    def all_open(self) -> None:
        """Returns when every rank has its part open, however long that takes. Raises what one has
        fallen of."""
        with self._heard:
            self._heard.wait_for(lambda: not self._missing or self._fallen is not None)
        self._opening = False
        self.check()
        self.comm.limit_s = self.limit_s

    def send(self, data: bytes) -> None:
        """A packet to every rank. Raises ExecutorError naming one that takes nothing."""
        self._sender.send(data)

    def check(self) -> None:
        """Raises what a rank has fallen of, if one has."""
        if self._fallen is not None:
            raise self._fallen

    def explain(self, error: ExecutorError) -> SparkError:
        """What a rank says that it fell of, which is what led to `error`; or else that."""
        with self._heard:
            self._heard.wait_for(lambda: self._fallen, LAST_WORDS_S)
        self._fall(error)
        return self._fallen or error

    def waiting(self, waits: bool) -> None:
        """Rank 0 begins to wait for its device, or has ended to."""
        self._waits_since = self._clock.last if waits else None

    def leave(self) -> None:
        """Tells all ranks to close, as this one does next. May be called twice."""
        if self._closing:
            return
        self._closing = True
        if self._fallen is None:
            with contextlib.suppress(ExecutorError):
                self.send(encode([Leave()]))
        else:
            self._let_go()

    def close(self) -> None:
        """Ends all ranks of this host, and lets the others go. May be called twice."""
        if self._closed:
            return
        self.leave()
        self._closed = True
        self._end_processes()
        self._watcher.join()
        for control in self._controls.values():
            control.close()
        self.comm.close()

    @property
    def _missing(self) -> list[int]:
        return sorted(set(self._controls) - self._opened)

    def _end_processes(self) -> None:
        listening = self._fallen is None and not self._missing
        until = time.monotonic() + (EXIT_S if listening else KILLED_S)
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            if process.poll() is None:
                process.kill()
                process.wait()

    def _watch(self) -> None:
        poll = select.poll()
        ranks = {control.fileno(): rank for rank, control in self._controls.items()}
        for number in ranks:
            poll.register(number, select.POLLIN)
        while not self._closing:
            for number, _ in poll.poll(TICK_S * 1000):
                if not self._hear(ranks[number]):
                    poll.unregister(number)
            self._check_opening()
            self._check_step()

    def _hear(self, rank: int) -> bool:
        """What the rank says; False when it says nothing more."""
        data = read_answer(self._controls[rank])
        if data is None:
            self._fall(ExecutorError(self._how_it_ended(rank)))
            return False
        try:
            answer = decode_answer(data)
        except msgspec.DecodeError as error:
            self._fall(ExecutorError(f"what rank {rank} says is not understood: {error}"))
            return False
        if isinstance(answer, RankFailed):
            kind = CapacityError if answer.passing else EngineError if answer.user else None
            self._fall((kind or ExecutorError)(f"rank {rank}: {answer.message}"))
            return False
        if isinstance(answer, Opening):
            self._news[rank] = self._clock.last, answer.at
            return True
        with self._heard:
            self._opened.add(rank)
            self._heard.notify_all()
        return True

    def _how_it_ended(self, rank: int) -> str:
        process = self._processes.get(rank)
        if process is None:
            return f"rank {rank} is gone: its host or its process has ended the connection"
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LAST_WORDS_S / 2)
        return f"rank {rank} is gone: its process {process.pid} ended with code {process.poll()}"

    def _fall(self, error: SparkError) -> None:
        if self._closing:
            return
        with self._heard:
            if self._fallen is None:
                self._fallen, self._fell_at = error, self._clock.last
                log.error("all ranks end: %s", error)
            self._heard.notify_all()
        self.comm.abort(str(self._fallen))
        self._let_go()

    def _let_go(self) -> None:
        """The others see their sockets end, and leave."""
        for control in self._controls.values():
            with contextlib.suppress(OSError):
                control.shutdown(socket.SHUT_RDWR)

    def _check_opening(self) -> None:
        now = self._clock.now()
        news = {rank: self._news[rank] for rank in self._missing if rank in self._news}
        quiet = [
            f"rank {rank} ({at!r})" for rank, (since, at) in news.items() if now - since > QUIET_S
        ]
        if quiet and self._fallen is None:
            words = f"{', '.join(quiet)} has not gone on with opening the engine for {QUIET_S:g} s"
            mend = "see whether its disk answers (`dmesg`) and its GPU (`nvidia-smi`)"
            self._fall(ExecutorError(f"{words}, and hangs: {mend}, then start again"))

    def _check_step(self) -> None:
        since, now = self._waits_since, self._clock.now()
        if since is not None and now - since > DEVICE_S and self._fallen is None:
            words = f"a step has waited for rank 0's device for {now - since:.0f} s"
            self._fall(ExecutorError(f"{words}: a rank, or a kernel that waits for one, hangs"))
        grace = GRACE_S if since is not None else OPENING_S if self._opening else math.inf
        if self._fallen is not None and now - self._fell_at > grace:
            where = "a step" if since is not None else "an opening"
            log.critical("rank 0 ends too, in %s that cannot end: %s", where, self._fallen)
            os._exit(EXIT_CODE)
