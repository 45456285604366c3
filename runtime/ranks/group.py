"""Rank 0's view of the other ranks: sends them packets, detects their failure, shuts them down.

Knows sockets, processes and time; knows no executor. A thread reads the sockets of all ranks. When
a rank fails, it aborts every call between ranks, and with it rank 0's step. If rank 0 waits for its
device, and the device waits for the failed rank, only the end of rank 0's process helps. Time in
which rank 0's process is stopped does not count against any limit.
"""

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
from spark_engine.runtime.executors.communicator import Communicator
from spark_engine.runtime.ranks import messages
from spark_engine.runtime.ranks.channel import PacketRing, Sender, read_answer
from spark_engine.runtime.ranks.links import LIMIT_S
from spark_engine.runtime.ranks.running_clock import TICK_S, RunningClock

QUIET_S = 300.0  # of a rank that opens its shard: longer than its longest step on a slow disk that
# several ranks read at once, and than NCCL's time limit (runtime/executors/nccl.py)
ERROR_WAIT_S = 0.5  # for a failed rank's own error to arrive
DEVICE_S = 6.0  # a step on a device; a chunk of prefill takes a second
GRACE_S = 2.0  # for rank 0 to leave a step that cannot end; DEVICE_S + GRACE_S is below the
# server's watchdog, so that the log names the rank
OPENING_S = 30.0  # for rank 0 to leave an opening that may wait for others on a device
EXIT_S = 5.0  # for the other ranks to close
KILLED_S = 1.0  # the same, if one has failed or is still opening, and reads no packets
EXIT_CODE = 70  # of a rank 0 that cannot leave its step
log = logging.getLogger(__name__)


class RankGroup:
    """The other ranks. `controls`: rank 0's sockets to them. `processes`: those that rank 0 has
    started. `limit_s`: time limit of a call between ranks, once all are open. The watching thread
    runs `_watch`; all other methods belong to one thread."""

    def __init__(
        self,
        comm: Communicator,
        controls: Mapping[int, socket.socket],
        processes: Mapping[int, subprocess.Popen[bytes]],
        ring: PacketRing | None = None,
        limit_s: float = LIMIT_S,
    ) -> None:
        self.comm = comm
        self.limit_s = limit_s
        self._controls, self._processes = dict(controls), dict(processes)
        self._sender = Sender(controls, ring, limit_s)
        self._opened: set[int] = set()
        self._stages: dict[
            int, tuple[float, str]
        ] = {}  # by rank: time and stage of its last report
        self._failure: SparkError | None = None
        self._failed_at = 0.0
        self._changed = threading.Condition()
        self._waits_since: float | None = None
        self._opening = False
        self._closing = self._closed = False
        self._clock = RunningClock()  # used by the watching thread
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    @property
    def pids(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in self._processes.items()}

    def begin(self, begin: messages.Begin, device: bool) -> None:
        """Asks all ranks to open the engine, while rank 0 opens its own shard. `device`: rank 0 may
        block on a device that waits for a failed rank; without one, it ends at its next `check`. A
        rank without a report for QUIET_S counts as failed; a rank that waits for another one
        reports that."""
        self.comm.limit_s, self._opening = math.inf, device
        self._stages = {rank: (self._clock.last, "its process starts") for rank in self._controls}
        self.send(messages.encode(begin))

    def all_open(self) -> None:
        """Returns when every rank is open, without a time limit. Raises a failed rank's error."""
        with self._changed:
            self._changed.wait_for(lambda: not self._missing or self._failure is not None)
        self._opening = False
        self.check()
        self.comm.limit_s = self.limit_s

    def send(self, data: bytes) -> None:
        """Sends a packet to every rank. Raises ExecutorError naming a rank that does
        not accept it."""
        self._sender.send(data)

    def check(self) -> None:
        """Raises a failed rank's error, if one has failed."""
        if self._failure is not None:
            raise self._failure

    def explain(self, error: ExecutorError) -> SparkError:
        """The failed rank's own error, which caused `error`; `error` itself if none arrives."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure, ERROR_WAIT_S)
        self._fail(error)
        return self._failure or error

    def waiting(self, waits: bool) -> None:
        """Marks the start or the end of a wait for rank 0's device."""
        self._waits_since = self._clock.last if waits else None

    def leave(self) -> None:
        """Asks all ranks to close; the caller closes rank 0 next. May be called twice."""
        if self._closing:
            return
        self._closing = True
        if self._failure is None:
            with contextlib.suppress(ExecutorError):
                self.send(messages.encode([messages.Leave()]))
        else:
            self._disconnect()

    def close(self) -> None:
        """Ends the ranks of this host, and closes the connections to the others. May be called
        twice."""
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
        listening = self._failure is None and not self._missing
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
                if not self._read(ranks[number]):
                    poll.unregister(number)
            self._check_opening()
            self._check_step()

    def _read(self, rank: int) -> bool:
        """Reads one answer of the rank; False if the rank sends no more."""
        data = read_answer(self._controls[rank])
        if data is None:
            self._fail(ExecutorError(self._how_it_ended(rank)))
            return False
        try:
            answer = messages.ANSWER.decode(data)
        except msgspec.DecodeError as error:
            self._fail(ExecutorError(f"rank {rank} sent an invalid answer: {error}"))
            return False
        if isinstance(answer, messages.RankFailed):
            kind = CapacityError if answer.passing else EngineError if answer.user else None
            self._fail((kind or ExecutorError)(f"rank {rank}: {answer.message}"))
            return False
        if isinstance(answer, messages.Opening):
            self._stages[rank] = self._clock.last, answer.at
            return True
        with self._changed:
            self._opened.add(rank)
            self._changed.notify_all()
        return True

    def _how_it_ended(self, rank: int) -> str:
        process = self._processes.get(rank)
        if process is None:
            return f"rank {rank} is gone: its host or its process closed the connection"
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ERROR_WAIT_S / 2)
        return f"rank {rank} is gone: its process {process.pid} ended with code {process.poll()}"

    def _fail(self, error: SparkError) -> None:
        if self._closing:
            return
        with self._changed:
            if self._failure is None:
                self._failure, self._failed_at = error, self._clock.last
                log.error("all ranks end: %s", error)
            self._changed.notify_all()
        self.comm.abort(str(self._failure))
        self._disconnect()

    def _disconnect(self) -> None:
        """Shuts down the sockets; the other ranks see the end and leave."""
        for control in self._controls.values():
            with contextlib.suppress(OSError):
                control.shutdown(socket.SHUT_RDWR)

    def _check_opening(self) -> None:
        now = self._clock.now()
        stages = {rank: self._stages[rank] for rank in self._missing if rank in self._stages}
        quiet = [
            f"rank {rank} ({at!r})" for rank, (since, at) in stages.items() if now - since > QUIET_S
        ]
        if quiet and self._failure is None:
            words = (
                f"{', '.join(quiet)} has made no progress with opening the engine for {QUIET_S:g} s"
            )
            remedy = "check its disk (`dmesg`) and its GPU (`nvidia-smi`)"
            self._fail(ExecutorError(f"{words}, and hangs: {remedy}, then start again"))

    def _check_step(self) -> None:
        since, now = self._waits_since, self._clock.now()
        if since is not None and now - since > DEVICE_S and self._failure is None:
            words = f"a step has waited for rank 0's device for {now - since:.0f} s"
            self._fail(ExecutorError(f"{words}: a rank hangs, or a kernel that waits for one"))
        grace = GRACE_S if since is not None else OPENING_S if self._opening else math.inf
        if self._failure is not None and now - self._failed_at > grace:
            where = "a step" if since is not None else "an opening"
            log.critical("rank 0 exits during %s that cannot end: %s", where, self._failure)
            os._exit(EXIT_CODE)
