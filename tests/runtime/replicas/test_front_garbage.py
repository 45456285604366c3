"""The front with peers that are not our replicas: arbitrary bytes, and clients that send such."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from spark_engine.runtime.replicas import forward, upstream
from spark_engine.runtime.replicas.fleet import Address, Fleet
from spark_engine.runtime.replicas.routing import Router
from spark_engine.runtime.replicas.upstream import Events, Lost, Upstream
from tests.runtime.replicas.front_world import CHAT, World, until, world

HEALTHY = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


@asynccontextmanager
async def raw(says: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that gives every request except health checks this answer, and closes; its received
    bytes."""
    came: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        came.append(head)
        writer.write(HEALTHY if b"/health" in head.split(b"\r\n")[0] else says)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", came


async def only_replica(w: World, url: str) -> None:
    """Makes this the front's only replica."""
    w.fakes.clear()

    async def members() -> list[Address]:
        return [Address("raw", url)]

    w.fleet._members = members
    await w.fleet.look()
    assert [r.name for r in w.fleet.up] == ["raw"]


@pytest.mark.parametrize(
    "says",
    [
        b"\0\1\2\3 no HTTP\r\n\r\n",
        b"HTTP/1.1 999999 ?\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"",
    ],
)
async def test_what_is_no_answer_is_a_replica_that_broke(says: bytes) -> None:
    async with world("a") as w:
        async with raw(says) as (url, _):
            await only_replica(w, url)
            status, found, _ = await w.ask("hi")
            assert (status, found["error"]["code"]) == (503, "no_replica")
            assert w.fleet.router.open.get("raw", 0) == 0


async def test_a_header_of_any_bytes_comes_through_as_it_is() -> None:
    says = b"HTTP/1.1 200 OK\r\nx-own: \xe4\xbd\xa0 \xff\r\ncontent-length: 2\r\n\r\n{}"
    async with world("a") as w:
        async with raw(says) as (url, came):
            await only_replica(w, url)
            name, _, port = w.url.removeprefix("http://").partition(":")
            reader, writer = await asyncio.open_connection(name, int(port))
            mine = "Bearer schlüssel".encode()
            head = f"GET /v1/models HTTP/1.1\r\nhost: {name}\r\nauthorization: ".encode()
            writer.write(head + mine + b"\r\nconnection: close\r\n\r\n")
            answer = await reader.read()
            writer.close()
            assert answer.startswith(b"HTTP/1.1 200") and b"x-own: \xe4\xbd\xa0 \xff\r\n" in answer
            assert any(
                b"authorization: " + mine + b"\r\n" in one.replace(b"A", b"a") for one in came
            )


def test_every_byte_of_an_event_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer of 32 MiB as one event, in parts of 16 KiB: repeated searches would read 32 GiB."""
    part, found = b"x" * (16 << 10), Events()
    start = time.process_time()
    for _ in range(2048):
        assert found.take(part) == b""
    assert time.process_time() - start < 2
    assert len(found.take(b"\n")) == 0 and len(found.take(b"\ny")) == (32 << 20) + 2
    assert found.left == b"y" and found.take(b"\n\nz\n\nw") == b"y\n\nz\n\n" and found.left == b"w"
    monkeypatch.setattr(upstream, "MOST_EVENT", 100)
    with pytest.raises(Lost, match="an event has more than"):
        found.take(b"x" * 200)


async def test_counters_are_there_though_one_replica_says_503() -> None:
    async with world("a", "b") as w:

        async def draining(url: str, *more: Any) -> tuple[int, bytes]:
            found = await get(url, *more)
            return (503, b"{}") if w.fakes["b"].url in url else found

        get = w.front._upstream.get
        w.front._upstream.get = draining  # type: ignore[method-assign, assignment]
        status, text = await w.get("/metrics")
        assert status == 200 and 'a_total{replica="a"} 2.0' in text
        assert 'a_total{replica="b"}' not in text


async def test_a_look_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = Upstream()
    looked: list[str] = []

    async def get(url: str, limit_s: float) -> tuple[int, bytes]:
        looked.append(url)
        if "odd" in url:
            raise RuntimeError("unexpected")
        return 200, b"{}"

    async def members() -> list[Address]:
        return [Address("odd", "http://odd"), Address("good", "http://good")]

    upstream.get = get  # type: ignore[method-assign, assignment]
    fleet = Fleet(members, upstream, Router())
    monkeypatch.setattr("spark_engine.runtime.replicas.fleet.PROBE_S", 0.01)
    watch = asyncio.create_task(fleet.watch())
    await until(lambda: len(looked) >= 6)
    assert not watch.done() and [r.name for r in fleet.up] == ["good"]
    assert "unexpected" in fleet.replicas["odd"].why
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
    await upstream.close()


async def test_a_whole_answer_that_a_slow_client_takes_ends_once() -> None:
    """Its replica is removed meanwhile: nothing is sent after the end."""
    sent: list[bytes] = []
    async with world("a") as w:
        taking = asyncio.Event()

        async def slow(
            self: Any, asked: Any, status: int, headers: Any, part: bytes, more: bool
        ) -> None:
            real = asked.send

            async def send(status: int, headers: Any, part: bytes, more: bool) -> None:
                sent.append(part)
                await real(status, headers, part, more)
                taking.set()
                await asyncio.sleep(0.3)

            asked.send = send
            await own(self, asked, status, headers, part, more)

        own = forward.Forwarder._send
        forward.Forwarder._send = slow  # type: ignore[method-assign]
        try:
            asking = asyncio.create_task(w.ask("hi"))
            await taking.wait()
            replica = w.fleet.replicas["a"]
            for _ in range(3):
                w.fleet.miss(replica, "silent")
            status, found, _ = await asking
        finally:
            forward.Forwarder._send = own  # type: ignore[method-assign]
        assert status == 200 and found["from"] == "a"
        await asyncio.sleep(0.4)
        assert len(sent) == 1
        _, text = await w.get("/metrics")
        assert "spark_front_broken_answers_total 0.0" in text


@pytest.mark.parametrize(
    "asked",
    [
        b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n"
        b"0\r\n\r\n",
        b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        b"POST %s HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked, identity\r\n\r\n{}",
        b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: +2\r\n\r\n{}",
        b"POST %s\xc3\xa9\xff HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}",
    ],
)
async def test_a_request_of_two_lengths_is_refused(asked: bytes) -> None:
    """Only one side would read the following bytes as another request."""
    async with world("a") as w:
        name, _, port = w.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(name, int(port))
        writer.write(asked % CHAT.encode() + b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(1 << 16), 60)
        writer.close()
        await asyncio.sleep(0.05)
        assert answer.startswith(b"HTTP/1.1 4"), answer[:200]
        assert "/smuggled" not in w.fakes["a"].looked
