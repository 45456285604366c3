"""The front's shutdown: it answers while a request runs."""

import asyncio
import gc
import signal
import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn

from spark_engine.runtime.replicas.front_process import _Server
from spark_engine.runtime.server.process.port import bind


class Slow:
    """An application that answers /slow when the test allows it, and all other paths at once."""

    def __init__(self) -> None:
        self.draining = False
        self.go = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/slow":
            await self.go.wait()
        status = 503 if self.draining and scope["path"] != "/slow" else 200
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})


async def _drained(drain_s: float, finish: bool) -> tuple[list[int], float]:
    """Statuses of a new connection during the drain and of the slow request; seconds."""
    slow, listener = Slow(), bind("127.0.0.1", 0)
    gc.unfreeze()
    config = uvicorn.Config(slow, lifespan="off", log_level="critical")
    server = _Server(config, SimpleNamespace(draining=False), listener, drain_s)  # type: ignore[arg-type]
    task = asyncio.create_task(server.serve([listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    found: list[int] = []
    async with httpx.AsyncClient(timeout=60) as client:
        while not server.started:
            await asyncio.sleep(0.01)
        assert gc.get_freeze_count(), "a full collection would scan all loaded objects"
        asked = asyncio.create_task(client.get(url + "/slow"))
        while not server.server_state.tasks:
            await asyncio.sleep(0.01)
        start = time.monotonic()
        server.handle_exit(signal.SIGTERM, None)
        slow.draining = server._front.draining
        await asyncio.sleep(0.3)  # some ticks
        async with httpx.AsyncClient(timeout=60) as other:
            found.append((await other.get(url + "/ready")).status_code)
        if finish:
            slow.go.set()
            found.append((await asked).status_code)
        await task
        asked.cancel()
        with pytest.raises(httpx.TransportError):
            await client.get(url + "/ready")
        await asyncio.gather(asked, return_exceptions=True)
    listener.close()
    gc.unfreeze()
    return found, time.monotonic() - start


def test_the_port_is_open_until_the_last_request_has_ended() -> None:
    found, _ = asyncio.run(asyncio.wait_for(_drained(60.0, finish=True), 60))
    assert found == [503, 200]


def test_a_drain_has_an_end() -> None:
    found, seconds = asyncio.run(asyncio.wait_for(_drained(1.0, finish=False), 60))
    assert found == [503] and seconds < 30
