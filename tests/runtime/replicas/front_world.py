"""A front with fake replicas, over real sockets, and a client."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import aiohttp
import uvicorn

from spark_engine.runtime.replicas.fleet import Address, Fleet
from spark_engine.runtime.replicas.front import Front
from spark_engine.runtime.replicas.routing import Router
from spark_engine.runtime.replicas.upstream import Upstream
from spark_engine.runtime.server.http.connections import Connection, Connections
from tests.runtime.replicas.fake_replica import FakeReplica, replica
from tests.runtime.server.http.served_app import serving

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
MOST = 1 << 16
LIMIT_S = 60.0  # ends a test that hangs


@dataclass
class World:
    """A front, its replicas, and a client."""

    url: str
    front: Front
    fleet: Fleet
    fakes: dict[str, FakeReplica]
    client: aiohttp.ClientSession

    async def ask(self, prompt: str, path: str = CHAT, **more: Any) -> tuple[int, Any, str]:
        body = {"messages": [{"role": "user", "content": prompt}], **more}
        async with self.client.post(self.url + path, json=body) as response:
            text = await response.text()
            found = text if more.get("stream") else json.loads(text)
            return response.status, found, response.headers.get("x-spark-replica", "")

    def hang(self, fake: FakeReplica) -> None:
        """Stops answering health checks until the front has noticed; other replicas are checked."""
        fake.hung = True
        get = self.fleet._upstream.get

        async def impatient(url: str, limit_s: float, *more: Any) -> Any:
            silent = fake.hung and url == fake.url + "/health"
            return await get(url, 0.3 if silent else LIMIT_S, *more)

        self.fleet._upstream.get = impatient  # type: ignore[method-assign]

    async def get(self, path: str, **headers: str) -> tuple[int, str]:
        async with self.client.get(self.url + path, headers=headers) as response:
            return response.status, await response.text()


@asynccontextmanager
async def world(*marks: str) -> AsyncIterator[World]:
    """A front before a replica for each mark; a test that hangs in it is ended."""
    async with asyncio.timeout(LIMIT_S), AsyncExitStack() as stack:
        fakes = {mark: await stack.enter_async_context(replica(mark)) for mark in marks}
        addresses = [Address(mark, fake.url) for mark, fake in fakes.items()]

        async def members() -> list[Address]:
            return [a for a in addresses if a.name in fakes]

        upstream = Upstream()
        stack.push_async_callback(upstream.close)
        fleet = Fleet(members, upstream, Router())
        front = Front(fleet, upstream, MOST)
        await fleet.look()
        http = cast(Any, partial(Connection, Connections(1000, LIMIT_S)))
        config = uvicorn.Config(front.app, port=0, http=http, lifespan="off", log_config=None)
        port = await stack.enter_async_context(serving(config))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        yield World(f"http://127.0.0.1:{port}", front, fleet, fakes, client)
        for fake in fakes.values():
            fake.gate.set()


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not done():
            await asyncio.sleep(0.01)
