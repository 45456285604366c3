"""The engine process's loop: idle it answers, and when a step raises, clients get the error."""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_engine.errors import CapacityError, ExecutorError
from spark_engine.interface import Limits
from spark_engine.runtime.engine.engine import EngineOptions
from spark_engine.runtime.engine.policy.pacing import LATENCY, Pace, PrefillPolicy
from spark_engine.runtime.engine.request import Event, Request
from spark_engine.runtime.engine.trace import NoTrace
from spark_engine.runtime.server.engine_client import ipc, worker
from spark_engine.runtime.server.engine_client.worker import TAKE_S, Opened, Worker
from spark_engine.runtime.server.process.open_service import worker_command
from spark_engine.vision import Image
from tests.runtime.fake_engine import FakeEngine

INFO = ipc.EngineInfo("fake", Limits(2, 64, 2, 32), (1,))


class Idle(FakeEngine):
    """Without a model and a tokenizer."""

    def __init__(self) -> None:
        self._live, self._ends, self._steps, self._rounds = {}, [], 0, 0

    def step(self) -> list[Event]:
        raise AssertionError("there is nothing to step")


class Broken(Idle):
    """Takes requests; its step raises."""

    def add(self, request_id: int, request: Request) -> None:
        self._live[request_id] = (request, [], 0)

    def step(self) -> list[Event]:
        raise ExecutorError("the device is gone")


class Closed(Exception):
    """Nothing more will come."""


class Socket:
    """A socket with commands, by default two requests; records reports."""

    def __init__(self, *commands: ipc.Command) -> None:
        commands = commands or tuple(ipc.Submit.of(number, Request((1,))) for number in (70, 80))
        self.waiting = [ipc.encode(command) for command in commands]
        self.sent: list[Any] = []
        self.pixels: list[bytes] = []

    def poll(self, timeout: int | None) -> bool:
        if timeout is None and not self.waiting:
            raise Closed  # the real one would sleep for ever
        return bool(self.waiting)

    def recv_multipart(self) -> list[bytes]:
        return [self.waiting.pop(0), *self.pixels]

    def send(self, data: bytes) -> None:
        self.sent.append(ipc.decode_report(data))


def _run(engine: Any, *commands: ipc.Command, socket: Any = None, watch: Any = None) -> list[Any]:
    """The reports of a worker that gets these commands, or two requests, and nothing more."""
    socket = socket or Socket(*commands)
    with pytest.raises(Closed):
        Worker(socket, INFO, engine, watch).run()
    reports: list[Any] = socket.sent
    return reports


def test_a_step_that_raises_ends_the_loop_and_sends_no_end() -> None:
    """The client, which has the requests, decides about errors and retries."""
    socket: Any = Socket()
    with pytest.raises(ExecutorError, match="the device is gone"):
        Worker(socket, INFO, Broken()).run()
    assert [type(report) for report in socket.sent] == [ipc.StepReport, ipc.Ready]


def test_the_options_of_the_server_reach_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def serve(address: str, open_engine: Callable[[], Opened], save: Callable[[], None]) -> int:
        assert address == "ipc://x"
        save()
        with pytest.raises(Closed):
            open_engine()
        return 0

    def opened(folder: Path, options: EngineOptions, trace: NoTrace) -> Opened:
        assert not trace.on
        found.append((folder, options))
        raise Closed

    monkeypatch.setattr(worker, "serve", serve)
    monkeypatch.setattr(worker, "open_engine", opened)
    given = [
        EngineOptions(),
        EngineOptions(policy=LATENCY, max_waiting=5, drafts=0, cache_bytes=0),
        EngineOptions(drafts=3, depth=1, seed=2**60, cache_bytes=7 << 30),
        EngineOptions(policy=PrefillPolicy(Pace.THROUGHPUT, itl_ms=12.5), graphs=False),
    ]
    for options in given:
        command = worker_command(tmp_path, options)
        at = command.index("spark_engine.runtime.server.engine_client.worker")
        worker.main([*command[at + 1 :], "ipc://x"])
    assert found == [(tmp_path, options) for options in given]


class Busy(Idle):
    """A request runs, and reading another one takes time."""

    idle = False  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[int] = []
        self.started = []
        self.seen: list[int] = []  # requests taken before each step

    def add(self, request_id: int, request: Request) -> None:
        self.taken.append(request_id)
        time.sleep(0.6 * TAKE_S)

    def step(self) -> list[Event]:
        self.seen.append(len(self.taken))
        if len(self.taken) == 6:
            raise Closed
        return []


def test_a_burst_of_requests_is_taken_over_several_steps_while_others_run() -> None:
    engine = Busy()
    _run(engine, *(ipc.Submit.of(number, Request((1,))) for number in range(6)))
    assert engine.taken == [*range(6)]
    assert len(engine.seen) >= 3 and engine.seen[0] <= 2, "their steps come in between"


class Full(Idle):
    def add(self, request_id: int, request: Request) -> None:
        raise CapacityError("the queue is full")


def test_a_request_that_the_engine_cannot_queue_is_sent_back_by_its_id() -> None:
    refused = [ipc.Refused(number, "the queue is full") for number in (70, 80)]
    assert _run(Full())[2:4] == refused


def test_an_idle_worker_answers_pings_and_counters_come_before_it_is_ready() -> None:
    """Else a first scrape has labels that no later one has."""
    first, ready, answer = _run(Idle(), ipc.Ping())
    assert first.stats.cache_budget == 1 << 22 and isinstance(ready, ipc.Ready)
    assert answer.events == [] and answer.stats.steps == 0


def test_a_cancel_of_what_has_ended_is_ignored() -> None:
    assert isinstance(_run(Idle(), ipc.Cancel(70), ipc.Ping())[-1], ipc.StepReport)


def test_short_memory_is_reported_to_the_engine_and_to_clients() -> None:
    reported: list[bool] = []

    class Frugal(Idle):
        def save_memory(self, short: bool) -> None:
            reported.append(short)

    class Later(Socket):
        def recv_multipart(self) -> list[bytes]:
            watch.short = shorts.pop(0)
            return super().recv_multipart()

        def poll(self, timeout: int | None) -> bool:
            return super().poll(timeout) if timeout is None else False

    shorts = [False, True, True, False]
    watch = SimpleNamespace(short=False)
    sent = _run(Frugal(), socket=Later(*[ipc.Ping()] * 4), watch=watch)
    assert reported == [True, False]
    reports = [r for r in sent if isinstance(r, ipc.StepReport)]
    assert [r.stats.memory_short for r in reports] == [False, False, True, True, False]


def test_pixels_come_in_frames_behind_their_request() -> None:
    added: list[Request] = []

    class Seeing(Idle):
        def add(self, request_id: int, request: Request) -> None:
            added.append(request)

    images = tuple(Image(at, 1, 2, bytes([at]) * 6144, bytes(16)) for at in (0, 3))
    request = Request((1,) * 6, images=images)
    socket = Socket(ipc.Submit.of(7, request))
    _, *socket.pixels = frames = ipc.submitted(7, request)
    pairs = zip(frames[1:], images, strict=True)
    assert len(frames[0]) < 500 and all(data is image.pixels for data, image in pairs)
    _run(Seeing(), socket=socket)
    assert added[0].images == images
