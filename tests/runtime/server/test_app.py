"""The HTTP face without an engine: keys and the sizes of bodies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import Request

from spark_engine.runtime.engine.request import Event
from spark_engine.runtime.server import endpoints as module
from spark_engine.runtime.server.api import completions
from spark_engine.runtime.server.app import create_app
from spark_engine.runtime.server.endpoints import Endpoints
from spark_engine.runtime.server.keys import Keyring
from tests.runtime.fake_client import FakeClient, service

KEY = "Secret-clé"


def _client(key: str | None = None) -> httpx.AsyncClient:
    served = service(FakeClient(), None)
    transport = httpx.ASGITransport(create_app(Endpoints(served), Keyring(None, key)))
    return httpx.AsyncClient(transport=transport, base_url="http://x")


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (f"Bearer {KEY}", 200),
        (f"bearer {KEY}", 200),
        (f"BEARER  {KEY} ", 200),
        (f"Bearer {KEY[:-1]}", 401),
        (f"Bearer {KEY}x", 401),
        (f"Bearer {KEY.lower()}", 401),
        (f"Bearer {KEY.upper()}", 401),
        (f"Basic {KEY}", 401),
        (f"Bearer{KEY}", 401),
        (KEY, 401),
        ("Bearer ", 401),
        ("Bearer", 401),
        ("", 401),
        (None, 401),
    ],
)
def test_only_the_whole_key_opens(given: str | None, status: int) -> None:
    async def ask() -> int:
        headers = {} if given is None else {"Authorization": given.encode()}
        async with _client(KEY) as client:
            assert (await client.get("/health", headers=headers)).status_code == 200
            return (await client.get("/v1/models", headers=headers)).status_code

    assert asyncio.run(ask()) == status


async def _parts(count: int, size: int, gate: asyncio.Event | None = None) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b" " * size
    if gate is not None:
        await gate.wait()


def test_a_body_over_the_limit_is_refused_before_or_while_it_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_BODY", 1000)

    async def ask(content: Any, **headers: str) -> tuple[int, str]:
        async with _client() as client:
            answer = await client.post("/v1/completions", content=content, headers=headers)
            return answer.status_code, answer.json()["error"]["message"]

    assert asyncio.run(ask(b" " * 1000)) == (400, asyncio.run(ask(b""))[1])
    assert asyncio.run(ask(_parts(3, 400)))[0] == 413
    for declared in ("1001", "9" * 5000):  # nothing of it has to come
        assert asyncio.run(ask(_parts(0, 0), **{"Content-Length": declared}))[0] == 413


def test_large_bodies_share_their_memory_and_small_ones_always_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SMALL_BODY", 100)
    monkeypatch.setattr(module, "LARGE_BODIES", 1000)

    async def ask() -> list[int]:
        gate = asyncio.Event()
        async with _client() as client:
            first = asyncio.ensure_future(
                client.post("/v1/completions", content=_parts(10, 90, gate))
            )
            await asyncio.sleep(0.05)
            found = [
                (await client.post("/v1/completions", content=b" " * size)).status_code
                for size in (100, 250, 350)  # 800 of 1000 are taken
            ]
            gate.set()
            await first
            found.append((await client.post("/v1/completions", content=b" " * 900)).status_code)
            return found

    assert asyncio.run(ask()) == [400, 400, 503, 400]


def test_who_leaves_before_the_first_event_is_sent_leaves_nothing_behind() -> None:
    """The body of a stream that was never begun has no end of its own."""
    client = FakeClient([Event(0, 40)])
    served = service(client, None)
    endpoints = Endpoints(served)
    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    told = iter([{"type": "http.request", "body": b'{"prompt": [5], "stream": true}'}])

    async def receive() -> Any:
        with contextlib.suppress(StopIteration):
            return next(told)
        await asyncio.sleep(0.05 if not began.is_set() else 0)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        began.set()
        await asyncio.sleep(1)  # no byte of it goes out

    async def ask() -> None:
        request = Request(scope, receive)
        response = await endpoints.generate(request, completions.start)
        assert client.cancelled == []
        await asyncio.wait_for(response(scope, receive, send), 5)

    began = asyncio.Event()
    asyncio.run(ask())
    assert client.cancelled == [0]
