"""Does jobs in worker processes: turns of owners, lanes, limits of time.

Short jobs never wait for long ones, and prompts never for grammars: each kind has separate workers,
first for a quick trial. A job that needs more time is started again among the long ones. A worker
over a limit is ended, and another one forked. Knows lanes, owners and limits; knows no API.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spark_engine.errors import SparkError
from spark_engine.runtime.server.engine_client.client import Busy
from spark_engine.runtime.server.prompts import contract, limits
from spark_engine.runtime.server.prompts.decoded_files import DecodedFiles
from spark_engine.runtime.server.prompts.fair_queue import FairQueue
from spark_engine.runtime.server.prompts.processes import Forker, Gone, WorkerProcess, command

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0  # between tries to start the forking process
STOPPED = "stopped"
TRIES = 3  # of a job if its worker ends by itself
Answer = tuple[contract.Result, list[bytes]]
log = logging.getLogger(__name__)


@dataclass(eq=False)
class Task:
    """A job in the pool. `done` gets its answer; cancelling `done` withdraws the job."""

    kind: contract.JobKind
    blobs: Sequence[contract.Blobs]
    owner: str
    done: asyncio.Future[Answer]
    size: int
    fetched: tuple[contract.Fetched, ...] = ()
    tries: int = 0


@dataclass
class Lane:
    """Workers for one class of jobs.

    Attributes:
        cpu_s: CPU seconds of a job, those for each MiB of it, and a maximum.
    """

    name: str
    workers: int
    nice: int  # the workers' niceness
    cpu_s: tuple[float, float, float]
    wall_s: tuple[float, float]  # seconds of wall time, and those for each second of CPU time
    memory: int = limits.MORE_MEMORY
    slower: Lane | None = None  # the lane for jobs that need more time
    queue: FairQueue[Task] = field(default_factory=FairQueue)
    walls: list[float] = field(default_factory=list)  # the limits of those that run
    since: float = 0.0  # when a job ended last, or started to wait while none did

    def cpu_of(self, task: Task) -> float:
        """CPU seconds that it may take here."""
        base, more, most = self.cpu_s
        return min(most, base + more * task.size / (1 << 20))

    def wall_of(self, task: Task) -> float:
        """Seconds of wall time that it may take here."""
        base, more = self.wall_s
        return base + more * self.cpu_of(task)

    def put(self, task: Task, first: bool = False) -> None:
        if not self.queue and not self.walls:
            self.since = time.monotonic()
        self.queue.put(task.owner, task, first)

    def stuck_s(self) -> float:
        """Seconds for which tasks wait and none ended, beyond the limits of those that run."""
        if not self.queue:
            return 0.0
        return time.monotonic() - self.since - max(self.walls, default=0.0)


def _prompt_lane() -> Lane:
    cpu = limits.CPU_S, limits.CPU_S_PER_MIB, limits.MOST_CPU_S
    wall = limits.WALL_S, limits.WALL_PER_CPU_S
    long = Lane("long prompts", limits.LONG_WORKERS, limits.LONG_NICE, cpu, wall)
    quick, wall = _quick(limits.QUICK_CPU_S), (limits.QUICK_WALL_S, 0.0)
    return Lane("prompts", limits.QUICK_WORKERS, 0, quick, wall, slower=long)


def _form_lane() -> Lane:
    memory, nice = limits.MORE_MEMORY + limits.GRAMMAR_STACK, limits.LONG_NICE
    cpu, wall = _quick(limits.GRAMMAR_CPU_S), (limits.WALL_S, limits.WALL_PER_CPU_S)
    slow = Lane("slow grammars", limits.GRAMMAR_WORKERS, nice, cpu, wall, memory)
    cpu, wall = _quick(limits.GRAMMAR_QUICK_CPU_S), (limits.QUICK_WALL_S, 0.0)
    return Lane("grammars", limits.GRAMMAR_QUICK_WORKERS, 0, cpu, wall, memory, slower=slow)


def _quick(seconds: float) -> tuple[float, float, float]:
    return seconds, 0.0, seconds


class WorkerPool:
    """Workers for the engine in `folder`. All methods run in one event loop."""

    def __init__(self, folder: Path) -> None:
        self._command = command(folder)
        self._prompts, self._forms = _prompt_lane(), _form_lane()
        firsts = (self._prompts, self._forms)
        self.lanes = [lane for first in firsts for lane in (first, first.slower) if lane]
        self._setup: contract.Setup | None = None
        self._decoded = DecodedFiles()
        self._forker: Forker | None = None
        self._starting: asyncio.Task[Forker] | None = None
        self._up = asyncio.Event()
        self._down_since: float | None = time.monotonic()
        self._reason = "the workers are being started"
        self._tasks: list[asyncio.Task[None]] = []
        self.workers: set[WorkerProcess] = set()

    async def begin(self) -> None:
        """Starts the process that loads and forks. Raises OSError."""
        self._forker = await Forker.start(self._command)

    async def start(self, setup: contract.Setup) -> None:
        """Waits until all is loaded; the pool then keeps itself running. Raises EngineError with
        the reason why something cannot be loaded, and InternalError."""
        self._setup = setup
        if self._forker is None:
            await self.begin()
        assert self._forker is not None
        await self._forker.load(setup)
        self._note_up()
        self._tasks = [asyncio.create_task(self._keep())]
        for lane in self.lanes:
            self._tasks += [asyncio.create_task(self._serve(lane)) for _ in range(lane.workers)]

    async def run(
        self,
        kind: contract.JobKind,
        blobs: Sequence[contract.Blobs],
        owner: str = "",
        fetched: tuple[contract.Fetched, ...] = (),
    ) -> Answer:
        """The result of one job and its blobs. `blobs`: the parts of each, the last of what was
        `fetched`; `owner`: of its turn. A caller that is cancelled withdraws the job.

        Raises Busy, and TooCostly where the job went over a limit."""
        size = sum(len(part) for blob in blobs for part in blob)
        done: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        task = Task(kind, blobs, owner, done, size, fetched)
        lane = self._forms if kind is contract.JobKind.FORM else self._prompts
        if size > limits.SMALL_BODY and lane is self._prompts and lane.slower is not None:
            lane = lane.slower
        lane.put(task)
        try:
            return await done
        finally:
            for row in self.lanes:
                row.queue.remove(owner, task)

    def refuse_one(self, owner: str) -> bool:
        """Refuses the last task of the owner with the most waiting tasks, if these are more than
        those of `owner`. Returns whether it did."""
        counts: Counter[str] = Counter()
        for lane in self.lanes:
            counts.update(lane.queue.counts())
        most, count = max(counts.items(), key=lambda pair: pair[1], default=("", 0))
        if count <= counts[owner] + 1:
            return False
        lane = max(self.lanes, key=lambda lane: lane.queue.counts().get(most, 0))
        last = lane.queue.last_of(most)
        lane.queue.remove(most, last)
        if not last.done.done():
            words = f"the queue is full, and {count} requests of yours wait to be read; retry"
            last.done.set_exception(Busy(words))
        return True

    def unhealthy_reason(self) -> str | None:
        """Why no job can be done now, or None."""
        if self._down_since is not None:
            down = time.monotonic() - self._down_since
            if down > limits.STARTS_S:
                return f"prompts cannot be read: no worker for {down:.0f} s ({self._reason})"
        for lane in self.lanes:
            if (stuck := lane.stuck_s()) > limits.STUCK_S:
                words = f"{len(lane.queue)} wait in the lane {lane.name!r}"
                return f"prompts are not being read: {words}, and none ended for {stuck:.0f} s"
        return None

    async def close(self) -> None:
        """Ends all processes. May be called twice."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in list(self.workers):
            worker.end()
        if self._forker is not None:
            await self._forker.close()

    async def _keep(self) -> None:
        pause = FIRST_PAUSE_S
        while True:
            if self._forker is not None:
                began = time.monotonic()
                await asyncio.wait({self._forker.ended})
                await self._forker.close()
                self._up.clear()
                self._forker, self._down_since = None, time.monotonic()
                log.warning("the process that forks prompt workers ended; it is started again")
                if time.monotonic() - began > LONGEST_PAUSE_S:
                    pause = FIRST_PAUSE_S
            try:
                assert self._setup is not None
                self._forker = await Forker.start(self._command)
                await self._forker.load(self._setup)
                self._note_up()
            except (OSError, SparkError) as error:
                self._reason = str(error)
                log.error("the process that forks prompt workers cannot be started: %s", error)
                if self._forker is not None:
                    await self._forker.close()
                    self._forker = None
            if self._forker is None:
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)

    def _note_up(self) -> None:
        self._down_since = None
        self._up.set()

    async def _serve(self, lane: Lane) -> None:
        """Keeps one worker: forks it, gives it tasks, and forks the next when it has ended."""
        while True:
            await self._up.wait()
            forker = self._forker
            if forker is None:
                continue
            try:
                worker = await forker.fork(lane.nice, lane.memory)
            except TimeoutError:
                if forker is self._forker:  # it is stopped, or hangs; `_keep` starts another
                    self._up.clear()
                    forker.kill()
                continue
            except Gone:
                await asyncio.sleep(limits.FORK_AGAIN_S)
                continue
            self.workers.add(worker)
            try:
                while await self._do_next(lane, worker):
                    pass
            finally:
                self.workers.discard(worker)
                worker.end()

    async def _do_next(self, lane: Lane, worker: WorkerProcess) -> bool:
        """Does one task. Returns whether the worker can do another."""
        task = await lane.queue.get()
        if task.done.done():  # its caller was cancelled
            return True
        if worker.has_left() or worker.is_stopped():
            lane.put(task, first=True)
            return False
        lane.walls.append(lane.wall_of(task))
        try:
            return await self._do(lane, worker, task)
        finally:
            lane.walls.remove(lane.wall_of(task))
            lane.since = time.monotonic()

    async def _do(self, lane: Lane, worker: WorkerProcess, task: Task) -> bool:
        """The same for a task that was not cancelled."""
        known = self._decoded.now() if task.size > limits.SMALL_BODY else {}
        seen = tuple(seen for seen, _ in known.values())
        job = contract.PromptJob(task.kind, lane.cpu_of(task), task.fetched, seen)
        header = contract.encode(job)
        asking = asyncio.ensure_future(worker.ask(header, task.blobs))
        try:
            limit = await _watched(asking, task, worker, lane.wall_of(task))
            if task.done.done():  # its caller was cancelled: the worker is ended
                return False
            if limit == STOPPED:
                log.warning("a worker that reads prompts was stopped from outside; it is ended")
                lane.put(task, first=True)
                return False
            if limit:
                self._to_slower_lane(lane, task, limit, late=True)
                return False
            answer, blobs = asking.result()
            result = contract.decode_result(answer)
            if isinstance(result, contract.Prepared):
                blobs = self._decoded.complete(result, blobs, known)
            task.done.set_result((result, blobs))
            return not worker.has_grown
        except Gone as gone:
            self._after(lane, task, gone.status)
            return False
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    def _after(self, lane: Lane, task: Task, status: int | None) -> None:
        """Finishes or retries a task after its worker ended."""
        if status == -signal.SIGPROF:
            self._to_slower_lane(lane, task, f"{lane.cpu_of(task):.3g} s of CPU time")
        elif status == -signal.SIGABRT:  # libraries abort where they get no memory
            task.done.set_exception(contract.TooCostly(f"{_words(task)} took too much memory"))
        else:
            self._again(lane, task, f"its process ended ({status})")

    def _to_slower_lane(self, lane: Lane, task: Task, limit: str, late: bool = False) -> None:
        """A task took too long: moves it to the slower lane, or ends it."""
        if lane.slower is not None:
            lane.slower.put(task)
        elif late:  # its process was stopped, or did not get to run
            self._again(lane, task, f"its process did not answer within {limit}")
        else:
            task.done.set_exception(contract.TooCostly(f"{_words(task)} took more than {limit}"))

    def _again(self, lane: Lane, task: Task, reason: str) -> None:
        task.tries += 1
        if task.tries < TRIES:
            log.warning("a job is done again: %s", reason)
            lane.put(task, first=True)
            return
        task.done.set_exception(Busy(f"{_words(task)} failed {TRIES} times: {reason}; retry"))


async def _watched(
    asking: asyncio.Future[Any], task: Task, worker: WorkerProcess, wall: float
) -> str:
    """Waits for a worker's answer. Returns the limit that it exceeded, STOPPED, or ""."""
    end, stopped = time.monotonic() + wall, False
    while (left := end - time.monotonic()) > 0:
        waited: set[asyncio.Future[Any]] = {asking, task.done}
        await asyncio.wait(
            waited, timeout=min(left, limits.LOOK_S), return_when=asyncio.FIRST_COMPLETED
        )
        if asking.done() or task.done.done():
            return ""
        was, stopped = stopped, worker.is_stopped()
        if was and stopped:
            return STOPPED
    return f"{wall:.3g} s"


def _words(task: Task) -> str:
    return "compiling its grammar" if task.kind is contract.JobKind.FORM else "reading the request"
