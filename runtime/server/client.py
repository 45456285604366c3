"""The HTTP process's end of the engine process: starts it, talks to it, notices its death.

Knows processes, sockets and the state of the engine; knows no HTTP and no text.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import zmq
import zmq.asyncio

from spark_engine.errors import CapacityError, EngineError, InternalError
from spark_engine.runtime.engine.request import Event, Request
from spark_engine.runtime.engine.trace import NoTrace
from spark_engine.runtime.server.ipc import (
    Cancel,
    EngineInfo,
    Failed,
    Ping,
    Ready,
    Refused,
    Report,
    Stats,
    StepReport,
    Submit,
    decode_report,
    encode,
)

PING_S = 1.0
EXIT_S = 5.0  # the engine process gets this long to leave by itself
LAST_WORDS_S = 2.0
SOCKET_PATH_MAX = 90  # bytes; Unix sockets allow 107


class EngineDied(InternalError):
    """The engine process is gone, or has stopped answering."""


class Busy(CapacityError):
    """The queue is full; come back later."""


class Begun(NamedTuple):
    """The engine began with a request, or went on with it, at `at` of `time.monotonic`."""

    request_id: int
    at: float


# a request's events of one step, in their order, or what happened to it instead
Answer = list[Event] | Begun | Busy | EngineDied
Mailbox = asyncio.Queue[Answer]


class EngineClient:
    """One engine process. All methods belong to one event loop.

    `command` is the process to start; the socket's address is appended to it. At most
    `max_queue` requests beyond the engine's slots are taken. `trace` is told what is
    done here.
    """

    def __init__(
        self,
        command: Sequence[str],
        max_queue: int = 256,
        stall_s: float = 60,
        trace: NoTrace | None = None,
    ) -> None:
        self._command = tuple(command)
        self.trace = trace or NoTrace()
        self.max_queue = max_queue
        self._stall_s = stall_s
        self._mailboxes: dict[int, Mailbox] = {}
        self._next_id = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._folder = _socket_folder()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._info: asyncio.Future[EngineInfo] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._last_report = self._last_progress = time.monotonic()
        self._closing = False
        self.stats = Stats()
        self.died = asyncio.Event()
        self.reason = ""

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return len(self._mailboxes)

    @property
    def pid(self) -> int | None:
        """The engine process."""
        return self._process.pid if self._process else None

    async def start(self) -> EngineInfo:
        """Starts the process and waits until the engine is loaded.

        Raises EngineError with the process's words when it cannot be loaded.
        """
        self._info = asyncio.get_running_loop().create_future()
        self._socket.set_hwm(0)
        self._socket.linger = 0
        address = f"ipc://{self._folder}/engine"
        self._socket.bind(address)
        pipe = asyncio.subprocess.PIPE  # held open by us alone: its end tells the child
        self._process = await asyncio.create_subprocess_exec(
            *self._command, address, stdin=pipe, start_new_session=True
        )
        self._tasks = [asyncio.create_task(t) for t in (self._receive(), self._watch())]
        info = await self._info
        self._last_report = time.monotonic()
        self._tasks.append(asyncio.create_task(self._ping()))
        return info

    def submit(self, requests: Sequence[Request], box: Mailbox, slots: int) -> list[int]:
        """Sends checked requests; their events will come to `box` under the returned ids.

        `slots` is the engine's max_seqs. Raises Busy when the queue is full, EngineDied when
        there is no engine.
        """
        if self.died.is_set():
            raise EngineDied(self.reason)
        ahead = self.in_flight - slots
        if ahead + len(requests) > self.max_queue:
            raise Busy(f"{max(ahead, 0)} requests are waiting (at most {self.max_queue}); retry")
        ids = list(range(self._next_id, self._next_id + len(requests)))
        # a request that cannot be encoded must leave none of them behind
        messages = [encode(Submit(number, r)) for number, r in zip(ids, requests, strict=True)]
        self._next_id += len(requests)
        for number, message in zip(ids, messages, strict=True):
            self._mailboxes[number] = box
            self._send(message)
        return ids

    def cancel(self, number: int) -> None:
        """Asks for the end of a request; its last event still comes. Unknown ids are ignored."""
        if number in self._mailboxes and not self.died.is_set():
            self._send(encode(Cancel(number)))

    def cancel_all(self) -> None:
        """Asks for the end of everything in flight."""
        for number in list(self._mailboxes):
            self.cancel(number)

    def unhealthy_reason(self) -> str | None:
        """Why the engine cannot be relied on now, or None."""
        now = time.monotonic()
        if self.died.is_set():
            return self.reason
        if self._info is None or not self._info.done():
            return "the engine is being loaded"
        if now - self._last_report > self._stall_s:
            return f"the engine has not answered for {now - self._last_report:.0f} s"
        if self._mailboxes and now - self._last_progress > self._stall_s:
            return f"no step has ended for {now - self._last_progress:.0f} s while requests wait"
        return None

    @property
    def step_age(self) -> float:
        """Seconds since the last sign that a step had ended; 0 while nothing is in flight."""
        return time.monotonic() - self._last_progress if self._mailboxes else 0.0

    async def close(self) -> None:
        """Ends the process. May be called twice."""
        self._closing = True
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            try:
                await asyncio.wait_for(self._process.wait(), EXIT_S)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._on_death("the server is closed")
        self._socket.close()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, message: bytes) -> None:
        # without a high-water mark a send never waits, so the future is done at once
        self._socket.send(message)

    async def _receive(self) -> None:
        try:
            while True:
                message = await self._socket.recv()
                start = self.trace.now()
                self._take(decode_report(message))
                self.trace.span("loop", "receive", start)
        except zmq.ZMQError as error:
            self._on_death(f"the socket to the engine process failed: {error}")

    def _take(self, report: Report) -> None:
        self._last_report = time.monotonic()
        if isinstance(report, StepReport):
            self._on_step(report)
        elif isinstance(report, Refused):
            self._deliver(report.id, Busy(report.message), last=True)
        elif isinstance(report, Failed):
            self._on_death(report.message, report.user)
        elif isinstance(report, Ready) and self._info and not self._info.done():
            self._info.set_result(report.info)

    def _on_step(self, report: StepReport) -> None:
        if report.stats.steps != self.stats.steps or report.events:
            self._last_progress = self._last_report
        self.stats = report.stats
        for number, at in report.begun:
            self._deliver(number, Begun(number, at), last=False)
        rounds: dict[int, list[Event]] = {}
        for event in report.events:
            rounds.setdefault(event.request_id, []).append(event)
        for number, events in rounds.items():
            self._deliver(number, events, last=events[-1].finish is not None)

    def _deliver(self, number: int, answer: Answer, last: bool) -> None:
        box = self._mailboxes.pop(number, None) if last else self._mailboxes.get(number)
        if box is not None:
            box.put_nowait(answer)

    async def _ping(self) -> None:
        while not self.died.is_set():
            if not self._mailboxes:
                self._last_progress = time.monotonic()  # the age counts from when work came
            self._send(encode(Ping()))
            await asyncio.sleep(PING_S)

    async def _watch(self) -> None:
        assert self._process is not None
        code = await self._process.wait()
        await self._read_last_messages()
        if not self._closing:
            self._on_death(f"the engine process ended with code {code}")

    async def _read_last_messages(self) -> None:
        """Lets the last words of a process that has ended arrive."""
        end = time.monotonic() + LAST_WORDS_S
        while await self._socket.poll(50) and time.monotonic() < end:
            await asyncio.sleep(0.01)  # `_receive` takes them

    def _on_death(self, reason: str, user: bool = False) -> None:
        if self.died.is_set():
            return
        self.reason = reason
        self.died.set()
        if self._info and not self._info.done():
            self._info.set_exception(EngineError(reason) if user else EngineDied(reason))
        for number in list(self._mailboxes):
            self._deliver(number, EngineDied(reason), last=True)


def _socket_folder() -> Path:
    """A folder that only this user can enter, with a path short enough for a Unix socket."""
    folder = Path(tempfile.mkdtemp(prefix="spark-"))
    if len(str(folder)) > SOCKET_PATH_MAX:
        with contextlib.suppress(OSError):
            folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="spark-", dir="/tmp"))
    return folder
