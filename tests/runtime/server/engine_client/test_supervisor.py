"""When an engine process is ended and started again, by a clock that is moved by hand."""

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq
import zmq.asyncio

from spark_engine.errors import EngineError
from spark_engine.runtime.engine.engine import EngineOptions
from spark_engine.runtime.engine.request import Event, FinishReason, Request
from spark_engine.runtime.server.engine_client import client as engine_client
from spark_engine.runtime.server.engine_client import engine_process, ipc, supervisor
from spark_engine.runtime.server.engine_client.engine_process import Death
from spark_engine.runtime.server.engine_client.supervisor import (
    Backoff,
    EngineDied,
    Supervision,
    Watchdog,
)
from spark_engine.runtime.server.process.open_service import worker_command
from spark_engine.vision import Image

FAST = Supervision(watchdog_s=10, restarts=2, wait_s=0.05)


def test_backoff_grows_and_ends() -> None:
    backoff = Backoff(7, 100)
    assert [backoff.after(now) for now in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, None]
    assert backoff.after(99.5) is None, "the first is not forgotten yet"
    assert backoff.after(103) == 4, "those at 0, 1, 2 and 3 are"
    assert Backoff(0, 100).after(5) is None


def test_the_watchdog_wants_answers_always_and_steps_where_some_are_owed() -> None:
    dog = Watchdog(10, 0)
    for now in range(1, 10):
        dog.tick(now, 1, has_work=False)
    dog.on_message(9.5, step=False)
    assert dog.complaint(19.4, has_work=False) is None
    assert "has not answered for 10 s" in str(dog.complaint(19.6, has_work=False))
    dog.on_message(19.4, step=False)
    assert "no step has ended for 11 s" in str(dog.complaint(20, has_work=True)), "since 9"
    dog.on_message(20, step=True)
    assert dog.complaint(29.9, has_work=True) is None
    assert Watchdog(0, 0).complaint(1e6, has_work=True) is None


def test_time_in_which_the_server_itself_did_not_run_is_not_counted() -> None:
    dog = Watchdog(10, 0)
    dog.tick(1, 1, has_work=True)
    dog.tick(31, 1, has_work=True)
    assert dog.complaint(31, has_work=True) is None
    assert dog.complaint(38.9, has_work=True) is None, "29 of the 31 seconds do not count"
    assert dog.complaint(39.1, has_work=True) is not None
    slow = Watchdog(10, 0)
    for now in range(2, 16, 2):  # a little late each time
        slow.tick(now, 1, has_work=True)
    assert slow.complaint(14, has_work=True) is not None


class Lives(engine_client.EngineClient):
    def __init__(self, max_queue: int) -> None:
        super().__init__((), max_queue, FAST)
        self.said: list[bytes] = []

    def send(self, *frames: bytes) -> None:
        self.said.append(frames[0])

    def rise(self) -> None:
        self.running = True
        self.on_engine_ready()

    def fall(self, words: str = "it fell", for_good: bool = False) -> None:
        self.running, self.death = False, Death(words)
        if for_good:
            self.died.set()
        self.on_engine_lost(words, for_good)

    def submitted(self) -> list[int]:
        found = [c.id for c in map(ipc.decode_command, self.said) if isinstance(c, ipc.Submit)]
        self.said.clear()
        return found


class Trial:
    """A client whose process is ready, without one."""

    def __init__(self, max_queue: int = 10) -> None:
        self.client = self.lives = Lives(max_queue)
        self.lives.rise()

    def submit(self, count: int = 1) -> tuple[list[int], engine_client.Mailbox]:
        box: engine_client.Mailbox = asyncio.Queue()
        return self.client.submit([Request((1, 2))] * count, box, 2), box

    def step(self, *events: Event) -> None:
        self.client.on_step(ipc.StepReport(list(events), ipc.Stats()))


async def test_pings_that_are_answered_prove_nothing_where_a_step_is_owed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: now))
    trial = Trial()

    def hear(seconds: float, steps: int = 0) -> str | None:
        nonlocal now
        now += seconds
        trial.lives.watchdog.tick(now, seconds, trial.client.sent > 0)
        trial.lives._on_message(ipc.encode(ipc.StepReport([], ipc.Stats(steps=steps))))
        return trial.lives.unhealthy_reason()

    assert hear(9) is hear(9) is None, "an idle engine may be silent"
    trial.submit()
    assert hear(9) is None and "no step has ended" in str(hear(9))
    assert hear(1, steps=1) is None


async def test_requests_with_a_token_end_and_the_others_are_retried_once() -> None:
    trial = Trial()
    (first, second), box = trial.submit(2)
    _, other = trial.submit()
    trial.step(Event(first, 5))
    assert trial.lives.submitted() == [0, 1, 2] and trial.client.sent == 3
    trial.lives.fall()
    assert box.get_nowait() == [Event(first, 5)]
    assert isinstance(box.get_nowait(), EngineDied) and box.empty() and other.empty()
    assert (trial.client.in_flight, trial.client.sent) == (2, 0)
    (new,), _ = trial.submit()
    assert trial.lives.submitted() == []
    trial.lives.rise()
    assert trial.lives.submitted() == [second, 2, new], "in their order: ids grow"
    trial.step(Event(new, 7))
    trial.lives.fall("again")
    found = box.get_nowait()
    assert isinstance(found, EngineDied) and str(found) == "again", "no third process"
    assert isinstance(other.get_nowait(), EngineDied)
    assert trial.client.in_flight == 0


async def test_the_pixels_of_requests_that_have_not_ended_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_client, "MOST_PIXELS", 30)
    images = (Image(0, 1, 1, bytes(12), bytes(16)),)
    trial = Trial()
    box: engine_client.Mailbox = asyncio.Queue()
    (first, _) = trial.client.submit([Request((1,), images=images)] * 2, box, 2)
    with pytest.raises(engine_client.Busy, match="the images of other requests"):
        trial.client.submit([Request((1,), images=images)], box, 2)
    trial.submit()
    trial.step(Event(first, finish=FinishReason.STOP))
    trial.client.submit([Request((1,), images=images)], box, 2)


async def test_the_wait_for_a_process_is_bounded() -> None:
    trial = Trial()
    _, box = trial.submit()
    trial.lives.fall()
    _, late = trial.submit()
    assert isinstance(await asyncio.wait_for(box.get(), 60), engine_client.Restarting)
    found = await asyncio.wait_for(late.get(), 60)
    assert isinstance(found, engine_client.Restarting) and found.code == "engine_restarting"
    assert "starting again for 0.05 s; retry" in str(found) and "it fell" not in str(found)
    assert trial.client.in_flight == 0
    trial.lives.said.clear()
    trial.lives.rise()
    assert trial.lives.said == [] and trial.client.sent == 0


async def test_a_wait_that_was_long_enough_is_forgotten_when_it_ends_well() -> None:
    trial = Trial()
    trial.lives.fall()
    (number,), box = trial.submit()
    trial.lives.rise()
    await asyncio.sleep(2 * FAST.wait_s)
    assert box.empty() and trial.client.sent == 1
    trial.step(Event(number, finish=FinishReason.LENGTH))
    assert trial.client.in_flight == 0


async def test_cancelled_is_cancelled_wherever_it_was() -> None:
    trial = Trial()
    (sent,), box = trial.submit()
    trial.client.cancel(sent)
    assert ipc.decode_command(trial.lives.said[-1]) == ipc.Cancel(sent)
    trial.lives.fall()
    assert box.get_nowait() == [Event(sent, finish=FinishReason.CANCELLED)]
    (held, other), box = trial.submit(2)
    trial.client.cancel(held)
    assert box.get_nowait() == [Event(held, finish=FinishReason.CANCELLED)]
    trial.lives.said.clear()
    trial.lives.rise()
    assert trial.lives.submitted() == [other]


async def test_the_queue_is_bounded_while_nothing_runs_too() -> None:
    trial = Trial()
    trial.lives.fall()
    trial.submit(12)
    with pytest.raises(engine_client.Busy, match="at most 10"):
        trial.submit()
    trial.lives.fall("enough", for_good=True)
    assert trial.client.in_flight == 0
    with pytest.raises(EngineDied, match="does not start again; the server's log says why"):
        trial.submit()


async def test_what_the_engine_does_not_take_is_busy_and_not_tried_again() -> None:
    trial = Trial()
    (number,), box = trial.submit()
    trial.client.on_refused(ipc.Refused(number, "full"))
    assert isinstance(box.get_nowait(), engine_client.Busy) and trial.client.in_flight == 0


async def test_an_answer_that_is_not_read_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "UNREAD", 5)
    trial = Trial()
    ids, box = trial.submit(2)
    _, other = trial.submit()
    for _ in range(5):
        trial.step(Event(ids[0], 1), Event(ids[1], 1), Event(2, 1))
        other.get_nowait()
    assert trial.client.in_flight == 1, "both choices of it ended, and no other request"
    cancels = [c for c in map(ipc.decode_command, trial.lives.said) if isinstance(c, ipc.Cancel)]
    assert [c.id for c in cancels] == ids
    found = [box.get_nowait() for _ in range(box.qsize())]
    assert isinstance(found.pop(), engine_client.ClientTooSlow) and len(found) == 10
    trial.step(Event(ids[0], 1), Event(2, 1))
    assert box.empty() and not other.empty()


def test_one_that_cannot_be_started_at_all_is_reported_at_once(tmp_path: Path) -> None:
    async def start(command: tuple[str, ...]) -> None:
        client = engine_client.EngineClient(command, how=Supervision(dumps=tmp_path))
        try:
            await client.start()
        finally:
            await client.close()

    with pytest.raises(EngineDied, match="ended with code 3"):
        asyncio.run(start((sys.executable, "-c", "raise SystemExit(3)")))
    with pytest.raises(EngineDied, match="cannot be started"):
        asyncio.run(start((str(tmp_path / "none"),)))
    with pytest.raises(EngineError, match=str(tmp_path)):
        asyncio.run(start(tuple(worker_command(tmp_path, EngineOptions()))))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), zmq.ZMQError(24)])
async def test_a_process_that_cannot_be_started_is_a_death_like_any(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(supervisor, "EngineProcess", refuse)
    trial = Trial()
    trial.lives._context = zmq.asyncio.Context()
    assert await trial.lives._run_process() == 0.5, "it is tried again"
    assert "cannot be started" in trial.lives.reason and not trial.lives.died.is_set()
    trial.lives._context.term()


async def test_a_process_that_is_not_ready_outlives_the_wish_for_its_stacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SIGUSR1 ends a process that does not handle it yet, or cannot write its stacks."""
    monkeypatch.setattr(engine_process, "ANSWER_S", 0.3)
    context = zmq.asyncio.Context()
    command = (sys.executable, "-c", "import sys; sys.stdin.read()")
    process = engine_process.EngineProcess(command, context, lambda data: None)
    await process.start()
    await process.dump()
    await process.close(patience_s=60)  # it exits when its standard input ends
    context.term()
    assert process._process is not None and process._process.returncode == 0


@pytest.mark.parametrize("ticks", range(8))
async def test_the_end_of_a_process_may_be_cancelled_just_when_it_has_ended(ticks: int) -> None:
    """Else an engine that dies while it is unloaded is restarted, and never unloaded."""
    context = zmq.asyncio.Context()
    process = engine_process.EngineProcess((sys.executable, "-c", ""), context, lambda data: None)
    await process.start()
    await process.ended
    ends = asyncio.create_task(process.close())
    for _ in range(ticks):
        await asyncio.sleep(0)
    cancelled = ends.cancel()
    await asyncio.wait({ends})
    assert ends.cancelled() == cancelled
    await process.close()
    context.term()


def test_the_log_explains_an_exit_code() -> None:
    assert engine_process.hint(-9).startswith(" (SIGKILL: out of memory?")
    said = [engine_process.hint(code) for code in (-11, -99, 3, 0)]
    assert said == [" (SIGSEGV)", " (an unknown signal)", "", ""]


async def test_clients_read_neither_exit_code_nor_reason() -> None:
    lives = Lives(engine_client.EngineClient((), 10, FAST))
    assert lives.unhealthy_reason() == "the engine is being loaded"
    for for_good, words in ((False, supervisor.RESTARTS), (True, supervisor.ENDED)):
        lives.fall("code -9 of /srv/secret", for_good)
        assert lives.unhealthy_reason() == words and "-9" in lives.reason


@pytest.mark.parametrize(("code", "words"), [(2, "the disk is full"), (-9, "ended with code -9")])
async def test_last_words_that_come_late_are_heard(code: int, words: str) -> None:
    """Such a process sent its reason; zmq's thread has not run since."""

    async def ended() -> int:
        return code

    async def nothing(timeout: int) -> int:
        return 0

    context = zmq.asyncio.Context()
    process = engine_process.EngineProcess((), context, lambda data: None)
    socket, process._socket = process._socket, cast(Any, SimpleNamespace(poll=nothing))
    process._process = cast(Any, SimpleNamespace(wait=ended))
    waits = asyncio.create_task(process._wait())
    await (waits if code < 0 else asyncio.sleep(0.1))
    process.record_death(Death("the disk is full"))
    await waits
    process._socket, process._process = socket, None
    await process.close()
    context.term()
    assert words in process.ended.result().reason
