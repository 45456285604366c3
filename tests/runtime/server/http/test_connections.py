"""uvicorn with our connections: deadlines, the limit, and which one is closed for another.

Client and server share an event loop with a clock that only the test moves: however long the
machine takes over a line, no deadline passes meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, cast

import pytest
import uvicorn

from spark_engine.runtime.server.http import descriptors
from spark_engine.runtime.server.http.connections import Connection, Connections
from tests.clocks import StandingLoop

READ_S = 0.3
HANGS_S = 60.0  # ends a test that hangs
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
BIG = 1 << 16
SLOW = GET.replace(b"/ ", b"/slow ")
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def turns() -> None:
    """Whatever can be done without a socket or more time is done."""
    for _ in range(20):
        await asyncio.sleep(0)


async def until(ok: Callable[[], bool]) -> None:
    """Something that comes over a socket; `Server.run` ends what never comes."""
    while not ok():
        await asyncio.sleep(0)


async def passes(seconds: float) -> None:
    """Advances the time, and runs the timers."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, StandingLoop)
    await turns()
    loop.now += seconds
    await turns()


class Heard(Connection):
    """Counts the bytes that came."""

    def __init__(self, server: Server, **given: Any) -> None:
        super().__init__(server.connections, **given)
        self._server = server

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._server.made.append(self)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._server.heard += len(data)


class Server:
    """A server in this event loop, for as long as `use` runs."""

    def __init__(self, most: int) -> None:
        self.refused: list[int] = []
        on_refusal = self.refused.append
        self.connections = Connections(most, READ_S, write_s=READ_S, refused=on_refusal)
        self.port = 0
        self.made: list[Heard] = []
        self.heard = self.said = 0  # bytes
        self.release = asyncio.Event()  # the answers to /slow
        self._streams: list[Streams] = []

    def run(self, use: Awaitable[None]) -> None:
        with asyncio.Runner(loop_factory=StandingLoop) as runner:
            runner.run(self._limited(use))

    async def _limited(self, use: Awaitable[None]) -> None:
        """By another clock than the loop's."""
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        timer = threading.Timer(HANGS_S, loop.call_soon_threadsafe, (task.cancel,))
        timer.daemon = True
        timer.start()
        try:
            await self._run(use)
        finally:
            timer.cancel()

    async def open(self, data: bytes = b"") -> Streams:
        """The server has accepted it, and received the data."""
        count = len(self.made)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._streams.append((reader, writer))
        await until(lambda: len(self.made) > count)
        await self.say(writer, data)
        return reader, writer

    async def say(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        """Sends, and waits until the server has received it."""
        writer.write(data)
        self.said += len(data)
        await until(lambda: self.heard >= self.said)

    async def ask(self, data: bytes = GET) -> bytes:
        reader, _ = await self.open(data)
        return await answer(reader)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        """Reads the body; /slow is answered when a test releases it."""
        more = scope["path"] != "/early"  # which answers before the body came
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            more = message.get("more_body", False)
        if scope["path"] == "/slow":
            await self.release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/big":
            gone = asyncio.ensure_future(receive())
            while not gone.done():  # as a stream that ends when its client has gone
                await send({"type": "http.response.body", "body": b"." * BIG, "more_body": True})
                await asyncio.sleep(0)
            return
        await send({"type": "http.response.body", "body": b"hello"})

    async def _run(self, use: Awaitable[None]) -> None:
        protocol = cast(Any, partial(Heard, self))
        how: dict[str, Any] = {"lifespan": "off", "log_config": None, "log_level": "critical"}
        config = uvicorn.Config(self.app, port=0, http=protocol, interface="asgi3", **how)
        server = uvicorn.Server(config)
        server.capture_signals = suppress  # type: ignore[method-assign,assignment]
        serving = asyncio.create_task(server.serve())
        await until(lambda: server.started)
        self.port = server.servers[0].sockets[0].getsockname()[1]
        try:
            await use
        finally:
            for _, writer in self._streams:
                writer.close()
            server.should_exit = server.force_exit = True
            while not serving.done():
                await passes(0.1)
            await serving


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Server:
    return Server(getattr(request, "param", 10))


@pytest.fixture(autouse=True)
def run(server: Server) -> Callable[[Awaitable[None]], None]:
    """Runs the tests that are coroutines."""
    return server.run


async def answer(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"hello")


async def _end(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the server closes."""
    with suppress(ConnectionResetError):
        return await reader.read()
    return b""


HALVES = [
    (b"", "head"),
    (b"GET / HTTP/1.1\r\nhost: x\r\n", "head"),
    (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nabc", "body"),
    (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab", "body"),
]


@pytest.mark.parametrize(("data", "part"), HALVES)
async def test_half_a_request_is_closed_in_time(data: bytes, part: str, server: Server) -> None:
    reader, _ = await server.open(data)
    await passes(0.9 * READ_S)
    assert server.refused == [] and len(server.connections.inside) == 1
    await passes(0.2 * READ_S)
    assert server.refused == [408]
    assert not server.connections.inside and not server.connections.waiting
    head, _, body = (await _end(reader)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert f"request's {part} did not come" in json.loads(body)["error"]["message"]


async def test_half_a_request_behind_a_whole_one_is_closed_too(server: Server) -> None:
    reader, _ = await server.open(GET + HALVES[2][0][:-3])
    assert (await answer(reader)).startswith(b"HTTP/1.1 200 ")
    await passes(1.1 * READ_S)
    assert b"request's body did not come" in await _end(reader)
    assert not server.connections.inside


async def test_an_answer_before_the_body_is_the_only_one(server: Server) -> None:
    """What is sent unasked on a silent connection would be taken for the next request's answer."""
    reader, writer = await server.open(b"POST /early HTTP/1.1\r\nhost: x\r\n")
    await server.say(writer, b"content-length: 3\r\n\r\n")
    await answer(reader)
    await server.say(writer, b"abc")
    ended = asyncio.ensure_future(_end(reader))
    while not ended.done():  # by our time or by uvicorn's
        await passes(READ_S)
    assert b"408" not in await ended
    assert not server.connections.inside


async def test_a_drip_does_not_move_the_deadline(server: Server) -> None:
    reader, writer = await server.open(b"GET / HTTP/1.1\r\n")
    for _ in range(18):
        await server.say(writer, b"a")
        await passes(0.05 * READ_S)
    assert server.refused == []
    await passes(0.15 * READ_S)
    assert server.refused == [408] and b"HTTP/1.1 408 " in await _end(reader)


async def test_the_body_has_a_separate_time_limit(server: Server) -> None:
    reader, writer = await server.open(b"POST / HTTP/1.1\r\nhost: x\r\n")
    await passes(0.7 * READ_S)
    await server.say(writer, b"content-length: 2\r\n\r\na")
    await passes(0.7 * READ_S)
    await server.say(writer, b"b")
    assert b"200 OK" in await answer(reader)


async def test_a_long_answer_and_an_idle_client_are_left_alone(server: Server) -> None:
    reader, writer = await server.open(SLOW)
    await passes(2 * READ_S)
    server.release.set()
    assert b"200 OK" in await answer(reader)
    await passes(2 * READ_S)  # between requests uvicorn's own limit holds
    await server.say(writer, GET[:10])
    await passes(0.1 * READ_S)
    await server.say(writer, GET[10:])
    assert b"200 OK" in await answer(reader)
    await server.say(writer, GET[:10])  # half of the third
    await passes(1.1 * READ_S)
    assert b"HTTP/1.1 408 " in await _end(reader)


@pytest.mark.parametrize("reads", [False, True])
async def test_a_client_that_reads_nothing_is_cut_and_one_that_reads_little_is_not(
    reads: bool, server: Server
) -> None:
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        client.setblocking(False)
        client.sendall(GET.replace(b"/ ", b"/big "))
        await until(lambda: bool(server.made and server.made[0]._unread))
        (one,) = server.made

        def took_some() -> bool:
            with suppress(BlockingIOError):
                client.recv(1 << 20)
            return one._untaken() < before or not one._unread

        for _ in range(6 if reads else 100):  # what fills the kernel's buffers counts as taken
            before = one._untaken()
            if reads:
                await until(took_some)
            await passes(1.1 * READ_S)
            if not reads and not server.connections.inside:
                break
        assert len(server.connections.inside) == int(reads)


@pytest.mark.parametrize("server", [4], indirect=True)
async def test_the_longest_silent_connection_is_replaced(server: Server) -> None:
    idle = [await server.open() for _ in range(4)]
    await server.say(idle[0][1], GET[:10])  # received last
    assert b"200 OK" in await server.ask()
    assert await _end(idle[1][0]) == b""
    left = [one in server.connections.inside for one in server.made]
    assert left == [True, False, True, True, True]


@pytest.mark.parametrize("server", [2], indirect=True)
async def test_a_client_between_two_requests_is_replaced_last(server: Server) -> None:
    reader, writer = await server.open(GET)
    await answer(reader)
    silent = [await server.open(b"") for _ in range(5)]
    await server.say(writer, GET)
    assert b"HTTP/1.1 200 " in await answer(reader)
    assert await _end(silent[0][0]) == b"", "the first of the silent has left"


@pytest.mark.parametrize("server", [4], indirect=True)
async def test_a_connection_that_is_being_answered_is_never_replaced(server: Server) -> None:
    busy = [await server.open(SLOW) for _ in range(4)]
    reader, _ = await server.open()
    refused = await _end(reader)
    assert refused.startswith(b"HTTP/1.1 503 ") and b"all 4 connections" in refused
    assert server.refused == [503]
    server.release.set()
    for reader, _ in busy:
        assert b"200 OK" in await answer(reader)
    assert b"200 OK" in await server.ask()


async def test_what_is_closed_leaves_nothing_behind(server: Server) -> None:
    for data in (b"", GET[:10], b"nonsense\r\n\r\n", SLOW):
        _, writer = await server.open(data)
        writer.close()
    await until(lambda: not server.connections.inside)
    assert not server.connections.waiting


def test_the_descriptors_are_raised_and_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(64, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    assert descriptors.raise_descriptor_limit() == 4096 and limits[-1] == (4096, 4096)
    assert descriptors.raise_descriptor_limit() == 4096 and len(limits) == 2
    limits.append((1024, resource.RLIM_INFINITY))
    assert descriptors.raise_descriptor_limit() == 1 << 20
    monkeypatch.setattr(os, "listdir", lambda _: ["0"] * 30)
    assert descriptors.connection_capacity(64) == 64 - 30 - descriptors.SPARE
    assert descriptors.connection_capacity(32) == 1
