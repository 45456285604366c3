"""The engine process's loop when a step raises: everyone is told, then the error goes on."""

from __future__ import annotations

from typing import Any

import pytest

from spark_engine.errors import ExecutorError
from spark_engine.interface import Limits
from spark_engine.runtime.ipc import Batch, EngineInfo, Ready, Submit, decode_report, encode
from spark_engine.runtime.request import Event, FinishReason, Request
from spark_engine.runtime.worker import Worker
from tests.runtime.fake_engine import FakeEngine

INFO = EngineInfo("fake", Limits(2, 64, 2, 32), (1,))


class Broken(FakeEngine):
    """Takes requests; its step raises, and so does `fail` where told."""

    def __init__(self, fails_too: bool) -> None:
        self._live: dict[int, Any] = {}
        self._ends: list[Event] = []
        self._next = self._steps = 0
        self._fails_too = fails_too

    def submit(self, request: Request) -> int:
        self._next += 1
        self._live[self._next] = request
        return self._next

    def step(self) -> list[Event]:
        raise ExecutorError("the device is gone")

    def fail(self, message: str) -> list[Event]:
        if self._fails_too:
            raise RuntimeError("nor can this be done")
        return super().fail(message)


class Socket:
    """Two commands on the way in; reports on the way out."""

    def __init__(self) -> None:
        self.waiting = [encode(Submit(number, Request((1,)))) for number in (70, 80)]
        self.sent: list[Any] = []

    def poll(self, timeout: int | None) -> bool:
        return bool(self.waiting)

    def recv(self) -> bytes:
        return self.waiting.pop(0)

    def send(self, data: bytes) -> None:
        self.sent.append(decode_report(data))


@pytest.mark.parametrize("fails_too", [False, True])
def test_a_step_that_raises_ends_every_request_first(fails_too: bool) -> None:
    socket: Any = Socket()
    with pytest.raises(ExecutorError, match="the device is gone"):
        Worker(socket, INFO, Broken(fails_too)).run()
    assert isinstance(socket.sent[0], Ready)
    if fails_too:
        assert len(socket.sent) == 1
        return
    batch = socket.sent[1]
    assert isinstance(batch, Batch)
    words = "ExecutorError: the device is gone"
    ends = [Event(number, finish=FinishReason.ERROR, message=words) for number in (70, 80)]
    assert batch.events == ends
