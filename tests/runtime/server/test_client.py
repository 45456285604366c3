"""The state of the engine as the HTTP process sees it: a real process, a scripted engine."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from spark_engine.runtime.engine.request import Request, SamplingParams
from spark_engine.runtime.server import supervisor as module
from spark_engine.runtime.server.client import EngineClient
from spark_engine.runtime.server.supervisor import Supervision
from spark_engine.runtime.text.tokenizer import Tokenizer
from tests.runtime import fake_engine, small_tokenizer

STALL_S = 1.0


async def _until(ok: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not ok() and time.monotonic() < end:
        await asyncio.sleep(0.02)
    return ok()


def test_idle_is_healthy_and_stuck_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine may be silent only where it owes no step: pings alone prove nothing."""
    monkeypatch.setattr(module, "PING_S", 0.1)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    folder = small_tokenizer.write(tmp_path)
    stuck = tuple(Tokenizer.load(folder).encode("STUCK"))

    async def use() -> None:
        command = (sys.executable, fake_engine.__file__, "worker", str(folder))
        client = EngineClient(command, 4, Supervision(STALL_S, restarts=0, dumps=tmp_path))
        try:
            await client.start()
            idle = time.monotonic()
            while time.monotonic() - idle < 2.5 * STALL_S:
                assert client.unhealthy_reason() is None
                await asyncio.sleep(0.02)
            start = time.monotonic()
            client.submit([Request(stuck, SamplingParams(max_tokens=5))], asyncio.Queue(), 4)
            assert await _until(lambda: client.unhealthy_reason() is not None, 5 * STALL_S)
            assert time.monotonic() - start > 0.8 * STALL_S
            assert "no step has ended" in str(client.unhealthy_reason()), (
                "pings were answered all the while"
            )
            client.cancel_all()
        finally:
            await client.close()

    asyncio.run(use())
