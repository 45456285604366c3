"""Supervises the engine process: starts it, ends one that hangs (watchdog), restarts it with
exponential backoff, and gives up when it ends too often.

Knows processes and times; what happens to requests meanwhile is decided in `client.py`.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from spark_engine.command import BUG
from spark_engine.errors import CapacityError, EngineError, InternalError
from spark_engine.runtime.engine.trace import NoTrace
from spark_engine.runtime.server.engine_client import ipc
from spark_engine.runtime.server.engine_client.dumps import Dumps
from spark_engine.runtime.server.engine_client.early import EarlyProcess
from spark_engine.runtime.server.engine_client.engine_process import Death, EngineProcess

WATCHDOG_S = 10.0
PING_S = 1.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
LATE_S = 1.0  # a tick later than this: this process did not run, whatever the engine does
# The HTTP process keeps the first engine's tokenizer and limits.
REPLACED = (
    "the folder of engine {} was built again while it was served, and what is there now is not "
    "what this server began with: start the server again (a systemd unit does so by itself)"
)
# The message for clients; the reason is only logged.
RESTARTS = "the engine stopped and is starting again"
ENDED = "the engine stopped and does not start again; the server's log says why"
CLOSED = "the server is closed"
log = logging.getLogger(__name__)


class EngineDied(InternalError):
    """The engine process has ended, or does not answer."""


@dataclass(frozen=True)
class Supervision:
    """The limits of an engine process and its restarts. Times in seconds.

    Attributes:
        watchdog_s: the process is ended after this time without an answer, or with work and
            without a step; 0: never.
    """

    watchdog_s: float = WATCHDOG_S
    restarts: int = 5  # restarts within `window_s`, after which the server gives up
    window_s: float = 600.0
    wait_s: float = 60.0  # how long a request may wait for a restart
    dumps: Path | None = None  # the folder for dumps; None is the system's for temporary files


class Backoff:
    """The time to wait before another start; None after too many starts within `window_s`."""

    def __init__(self, restarts: int, window_s: float) -> None:
        self._most, self._window_s = restarts, window_s
        self._deaths: deque[float] = deque()

    def after(self, now: float) -> float | None:
        """The process ended at `now`."""
        while self._deaths and now - self._deaths[0] >= self._window_s:
            self._deaths.popleft()
        if len(self._deaths) >= self._most:
            return None
        self._deaths.append(now)
        return min(FIRST_PAUSE_S * 2.0 ** (len(self._deaths) - 1), LONGEST_PAUSE_S)


class Watchdog:
    """Detects an engine with work that makes no steps. Times are of one clock, in seconds."""

    def __init__(self, limit_s: float, now: float) -> None:
        self._limit_s = limit_s
        self._report = self.progress = self._tick = now

    def on_message(self, now: float, step: bool) -> None:
        """The process sent a message; `step`: a step has ended."""
        self._report = now
        if step:
            self.progress = now

    def tick(self, now: float, due_s: float, has_work: bool) -> None:
        """Called every `due_s`. Time in which this process did not run is not counted."""
        late = now - self._tick - due_s
        self._tick = now
        if late > LATE_S:
            self._report += late
            self.progress += late
        if not has_work:
            self.progress = now  # the age counts from when work arrived

    def complaint(self, now: float, has_work: bool) -> str | None:
        """Why the process must be ended, or None."""
        if not self._limit_s:
            return None
        if now - self._report > self._limit_s:
            return f"the engine has not answered for {now - self._report:.0f} s"
        if has_work and now - self.progress > self._limit_s:
            return f"no step has ended for {now - self.progress:.0f} s while requests wait"
        return None


class Supervisor(ABC):
    """One engine process at a time, restarted when it ends. All methods run in one event loop.
    A subclass has the requests; the abstract methods tell it what happens to the process."""

    def __init__(self, command: Sequence[str], how: Supervision, trace: NoTrace) -> None:
        self._command, self._how, self.trace = tuple(command), how, trace
        self._backoff = Backoff(how.restarts, how.window_s)
        self._dumps = Dumps(how.dumps)
        self._early: EarlyProcess | None = None
        self._context: zmq.asyncio.Context | None = None
        self._process: EngineProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._first: asyncio.Future[ipc.EngineInfo] | None = None
        self._spawned = asyncio.Event()  # the first process runs, or cannot be started
        self.watchdog = Watchdog(how.watchdog_s, time.monotonic())
        self._build = ""  # of the first process's engine
        self.running = False  # a process takes requests
        self.restarts = 0
        self._stats = ipc.Stats()  # of the process that runs, or ran last
        self.died = asyncio.Event()  # set when no restart follows
        self.death: Death | None = None  # the last one

    @property
    @abstractmethod
    def sent(self) -> int:
        """Requests that the process has and that have not ended."""

    @abstractmethod
    def on_engine_ready(self) -> None:
        """A process accepts requests."""

    @abstractmethod
    def on_step(self, report: ipc.StepReport) -> None:
        """The events of a step."""

    @abstractmethod
    def on_refused(self, report: ipc.Refused) -> None:
        """The engine's own queue is full."""

    @abstractmethod
    def on_engine_lost(self, words: str, for_good: bool) -> None:
        """The process has ended. `words`: for clients; `for_good`: no restart follows."""

    @abstractmethod
    def describe(self) -> object:
        """The requests for a dump: no text and no token."""

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def stats(self) -> ipc.Stats:
        """The engine's counters. All but `restarts` restart at 0 with its process."""
        return msgspec.structs.replace(self._stats, restarts=self.restarts)

    @property
    def step_age(self) -> float:
        """Seconds since a step ended, or since work arrived."""
        return time.monotonic() - self.watchdog.progress

    @property
    def reason(self) -> str:
        """Why the last process ended, for the log."""
        return self.death.reason if self.death else ""

    @property
    def words(self) -> str:
        """The message for clients when no restart follows."""
        return CLOSED if self.reason == CLOSED else ENDED

    @property
    def exit_code(self) -> int:
        """The server's exit code, from the last process's end."""
        return self.death.code if self.death else BUG

    async def start(self) -> ipc.EngineInfo:
        """`begin`, then `loaded`."""
        await self.begin()
        return await self.loaded()

    async def begin(self, early: EarlyProcess | None = None) -> None:
        """Starts the first process, `early` where it is given; returns once it runs, or cannot be
        started."""
        self._early = early
        self._first = asyncio.get_running_loop().create_future()
        self._context = self._context or zmq.asyncio.Context()
        self._spawned.clear()
        self._task = asyncio.create_task(self._supervise())
        await self._spawned.wait()

    async def loaded(self) -> ipc.EngineInfo:
        """Waits until the engine of the first process is loaded.

        Raises EngineError with the process's message when it cannot be loaded, CapacityError where
        the next try may succeed, or EngineDied.
        """
        assert self._first is not None, "`begin` comes first"
        return await self._first

    def send(self, *frames: bytes) -> None:
        if self._process is not None:
            self._process.send(*frames)

    def unhealthy_reason(self) -> str | None:
        """Why the engine cannot be relied on now, or None."""
        if self.died.is_set():
            return self.words
        if not self.running:
            return RESTARTS if self.death else "the engine is being loaded"
        return self.watchdog.complaint(time.monotonic(), self.sent > 0)

    async def dump(self, words: str) -> Path | None:
        """Writes a dump of both processes; its path, or None where it could not be written."""
        return self._write(words, await self._process.dump() if self._process else {})

    async def close(self) -> None:
        """Ends the process. May be called twice."""
        await self._stop()
        if not self.died.is_set():
            self._give_up(Death(CLOSED))
        if self._context is not None:
            self._context.term()
            self._context = None

    async def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._process is not None:
            await self._process.close()

    async def _supervise(self) -> None:
        try:
            while (pause := await self._run_process()) is not None:
                await asyncio.sleep(pause)
                self.restarts += 1
                log.info("restarting the engine")
        except Exception as error:
            log.exception("the supervisor failed")
            self._give_up(Death(f"the supervisor failed ({type(error).__name__}: {error})"))

    async def _run_process(self) -> float | None:
        """Runs one process to its end. Returns the pause before a restart; None: no restart."""
        assert self._context is not None
        process = None
        try:
            process = self._process = EngineProcess(self._command, self._context, self._on_message)
            await process.start(self._early)
            self._spawned.set()
            death = await self._watch(process)
        except (OSError, zmq.ZMQError) as error:  # a full disk, no descriptors
            self._spawned.set()
            death = Death(f"the engine process cannot be started: {error}")
        self.running, self.death = False, death
        damaged = death.user and not death.passing
        permanent = damaged or death.final or (self._first is not None and not self._first.done())
        pause = None if permanent else self._backoff.after(time.monotonic())
        if pause is not None:
            self.on_engine_lost(f"{RESTARTS}; send the request again", for_good=False)
            log.error("the engine process died; restarting it in %.1f s: %s", pause, death.reason)
        if process is not None and (found := process.crash_dump()) and not death.user:
            self._write(f"the engine process died: {death.reason}", found)
        if process is not None and not await process.close():
            death = Death(f"the engine process {process.pid} cannot be ended ({death.reason})")
            pause = None
        if pause is None:
            self._give_up(death)
        return pause

    async def _watch(self, process: EngineProcess) -> Death:
        """Pings the process, and ends it when it hangs. Returns how it ended."""
        due_s = min(PING_S, self._how.watchdog_s / 4 or PING_S)
        while not process.ended.done():
            await asyncio.wait({process.ended}, timeout=due_s)
            now, has_work = time.monotonic(), self.sent > 0
            self.watchdog.tick(now, due_s, has_work)
            if process.ended.done() or not self.running:
                continue
            if (words := self.watchdog.complaint(now, has_work)) is None:
                process.send(ipc.encode(ipc.Ping()))
                continue
            self.running, self.death = False, Death(words)
            self._write(f"the watchdog ended the engine process: {words}", await process.dump())
            process.record_death(Death(words))
            await process.close(patience_s=0)
        return process.ended.result()

    def _on_message(self, message: bytes) -> None:
        start = self.trace.now()
        report = ipc.decode_report(message)
        step = isinstance(report, ipc.StepReport) and bool(
            report.events or report.stats.steps != self._stats.steps
        )
        self.watchdog.on_message(time.monotonic(), step)
        if isinstance(report, ipc.StepReport):
            self._stats = report.stats
            self.on_step(report)
        elif isinstance(report, ipc.Refused):
            self.on_refused(report)
        elif isinstance(report, ipc.Ready):
            self._on_ready(report.info)
        elif self._process is not None:
            assert isinstance(report, ipc.Failed)
            self._process.record_death(Death(report.message, report.user, report.passing))
        self.trace.span("loop", "receive", start)

    def _on_ready(self, info: ipc.EngineInfo) -> None:
        self._build = self._build or info.build
        if info.build != self._build and self._process is not None:
            self._process.record_death(Death(REPLACED.format(info.name), final=True))
            return
        self.watchdog = Watchdog(self._how.watchdog_s, time.monotonic())
        self.running = True
        if self._first is not None and not self._first.done():
            self._first.set_result(info)
        else:
            log.info("the engine is ready again")
        self.on_engine_ready()

    def _give_up(self, death: Death) -> None:
        self.died.set()
        self._end(death)

    def _end(self, death: Death) -> None:
        """No process follows the one that has ended."""
        self.running, self.death = False, death
        if self._first is not None and not self._first.done():
            kind = CapacityError if death.passing else EngineError if death.user else EngineDied
            self._first.set_exception(kind(death.reason))
        self.on_engine_lost(self.words, for_good=True)

    def _write(self, words: str, engine: dict[str, str]) -> Path | None:
        http = {"supervisor": self._describe(), "engine_client": self.describe()}
        try:
            path = self._dumps.write(words, engine, http)
        except OSError as error:
            log.error("%s; no dump was written: %s", words, error)
            return None
        log.error("%s; stacks and states are in %s", words, path)
        return path

    def _describe(self) -> dict[str, object]:
        return {
            "engine_pid": self.pid,
            "running": self.running,
            "restarts": self.restarts,
            "last_death": self.reason,
            "seconds_without_a_step": round(time.monotonic() - self.watchdog.progress, 3),
            "stats": self._stats,
        }
