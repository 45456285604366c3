"""Short memory of the host: its limits, and the path from the engine to a client."""

import asyncio
import time
from typing import Any

import pytest

from spark_engine.device.shared_memory import HostBudget
from spark_engine.runtime.engine.request import Request
from spark_engine.runtime.server.engine_client import memory_watch
from spark_engine.runtime.server.engine_client.client import EngineClient, MemoryShort
from spark_engine.runtime.server.engine_client.ipc import Stats
from spark_engine.runtime.server.engine_client.memory_watch import GIB, MemoryWatch, watch_memory
from spark_engine.runtime.server.replies.errors import error_response


def test_memory_is_short_from_below_six_gib_until_seven_are_there() -> None:
    found: list[int | None] = []
    watch, short = MemoryWatch(lambda: found[-1]), []
    for gib in (9, 6, 5.99, 6, 6.99, None, 7, 6.5, 6, 5, 7.5):
        found.append(None if gib is None else int(gib * GIB))
        watch.look()
        short.append(watch.short)
    assert short == [False, False, True, True, True, True, False, False, False, True, False]


def test_it_is_read_in_a_thread_about_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory_watch.EVERY_S == 1
    monkeypatch.setattr(memory_watch, "EVERY_S", 0.01)
    watch = MemoryWatch(lambda: GIB)
    watch.start()
    end = time.monotonic() + 20
    while not watch.short and time.monotonic() < end:
        time.sleep(0.01)
    watch.stop()
    assert watch.short


@pytest.mark.parametrize("shared", [False, True])
def test_only_a_memory_that_is_the_gpus_too_is_watched(
    monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    monkeypatch.setattr(memory_watch, "host_budget", lambda _: HostBudget(None, 0, shared))
    watch = watch_memory()
    assert (watch is not None) == shared
    if watch is not None:
        watch.stop()


def test_a_new_request_is_refused_while_it_is_short() -> None:
    client = EngineClient(["none"])
    supervisor: Any = client
    supervisor.running = True
    sent: list[bytes] = []
    supervisor.send = sent.append
    box: Any = asyncio.Queue()
    client.submit([Request((1,))], box, 4)
    supervisor._stats = Stats(memory_short=True)
    with pytest.raises(MemoryShort) as refused:
        client.submit([Request((1,))], box, 4)
    status, body = error_response(refused.value)
    assert status == 503 and body["error"]["code"] == "memory_short"
    assert "memory_short" in str(client.unhealthy_reason())
    supervisor._stats = Stats()
    client.submit([Request((1,))], box, 4)
    assert len(sent) == 2 and "memory_short" not in str(client.unhealthy_reason())
