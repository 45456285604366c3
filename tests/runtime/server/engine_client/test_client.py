"""The state of the engine as the HTTP process sees it: a real process, a scripted engine."""

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from spark_engine.runtime.engine.request import Request, SamplingParams
from spark_engine.runtime.server.engine_client import supervisor as module
from spark_engine.runtime.server.engine_client.client import EngineClient
from spark_engine.runtime.server.engine_client.supervisor import Supervision
from spark_engine.runtime.text.tokenizer import Tokenizer
from tests.patient import until
from tests.repository import PATH
from tests.runtime import fake_engine, small_tokenizer

STALL_S = 1.0


async def test_idle_is_healthy_and_stuck_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine may be silent only where it owes no step: pings alone prove nothing.

    The clock only advances when a ping was answered: a process that does not run loses no time.
    """
    now = 0.0
    monkeypatch.setattr(module, "PING_S", 0.02)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setenv("PYTHONPATH", PATH)
    folder = small_tokenizer.write(tmp_path)
    stuck = tuple(Tokenizer.load(folder).encode("STUCK"))
    command = (sys.executable, fake_engine.__file__, "worker", str(folder))
    client = EngineClient(command, 4, Supervision(STALL_S, restarts=0, dumps=tmp_path))
    try:
        await client.start()
        dog = client.watchdog

        def heard() -> bool:
            return dog._report == now or not client.running

        async def passes(seconds: float) -> None:
            """In parts in each of which it answers."""
            nonlocal now
            for _ in range(4):
                now += seconds / 4
                await until(heard)

        await passes(0.9 * STALL_S)
        await passes(0.9 * STALL_S)
        assert client.unhealthy_reason() is None
        client.submit([Request(stuck, SamplingParams(max_tokens=5))], asyncio.Queue(), 4)
        await passes(0.9 * STALL_S)
        assert client.unhealthy_reason() is None
        await passes(0.9 * STALL_S)
        words = client.reason or client.unhealthy_reason()
        assert client.unhealthy_reason() is not None
        assert "no step has ended" in str(words), "pings were answered all the while"
        client.cancel_all()
    finally:
        await client.close()
