"""Limits of the front: bodies, questions, headers, and clients that disconnect."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from spark_engine.runtime.replicas import forward, prompt_digests
from spark_engine.runtime.replicas.fleet import MISSES, Address, Fleet, Replica
from spark_engine.runtime.replicas.forward import ClientRequest, Forwarder, Unsure, passed
from spark_engine.runtime.replicas.front_metrics import FrontMetrics
from spark_engine.runtime.replicas.routing import Router
from spark_engine.runtime.replicas.upstream import Headers, Lost, Upstream
from spark_engine.runtime.server.http import bodies
from spark_engine.runtime.server.http.bodies import Bodies, ReceivedBody
from tests.clocks import leap
from tests.loop_watch import LIMIT_S, watched
from tests.runtime.replicas.front_world import CHAT, MOST, RESPONSES, until, world


async def test_a_compressed_prompt_is_routed_by_what_it_says() -> None:
    async with world("a", "b", "c") as w:

        async def ask(prompt: str) -> str:
            data = gzip.compress(json.dumps({"messages": [prompt]}).encode())
            head = {"content-encoding": "gzip", "content-type": "application/json"}
            async with w.client.post(w.url + CHAT, data=data, headers=head) as response:
                assert response.status == 200
                return response.headers["x-spark-replica"]

        first = [await ask(f"{i}" * 9000) for i in range(3)]
        assert sorted(first) == ["a", "b", "c"]
        assert [await ask(f"{i}" * 9000) for i in range(3)] == first
        for fake in w.fakes.values():
            assert "Content-Encoding" not in fake.heads[0] and len(fake.asked) == 2
        bomb = gzip.compress(b"0" * (MOST + 1))
        head = {"content-encoding": "gzip"}
        async with w.client.post(w.url + CHAT, data=bomb, headers=head) as response:
            assert response.status == 413 and len(bomb) < 1000
        async with w.client.post(w.url + CHAT, data=b"no", headers=head) as response:
            assert response.status == 400


def test_a_body_that_no_engine_takes_is_not_read_for_its_prompt() -> None:
    prompt = "x" * prompt_digests.MOST
    assert not prompt_digests.places([json.dumps({"prompt": prompt}).encode()])
    assert prompt_digests.places([json.dumps({"prompt": prompt[:-99]}).encode()])


@pytest.mark.parametrize(
    ("part", "size", "path"),
    [
        (b"{},", prompt_digests.MOST, CHAT),
        (b"{},", prompt_digests.MOST, RESPONSES),
        (b'"previous_response_id" ', 32 << 20, RESPONSES),
        (b'"', 32 << 20, RESPONSES),
    ],
)
async def test_no_body_keeps_the_loop(part: bytes, size: int, path: str) -> None:
    """The keys are not checked yet, and the streams of all replicas wait."""
    body = b'{"messages":[' + part * ((size - 20) // len(part)) + b"{}]}"
    async with world("a") as w:
        w.fakes.clear()  # the replicas' own work is not measured
        await w.fleet.look()
        w.front._bodies.most = 32 << 20

        async def sent() -> AsyncIterator[bytes]:
            for at in range(0, len(body), 1 << 16):
                yield body[at : at + (1 << 16)]

        with watched() as longest:
            async with w.client.post(w.url + path, data=sent()) as response:
                assert response.status == 503, await response.text()
        assert longest.seconds < LIMIT_S, longest


async def test_the_stored_answer_is_found_across_parts_of_a_body() -> None:
    text = b'{"input": "x", "previous_response_id": "resp_1"}'
    for at in range(len(text)):
        body = ReceivedBody(Bodies())
        body.parts = [b" " * forward.LOOK, b"x" * 700 + text[:at], bytearray(text[at:])]
        assert await forward._previous(body) == "resp_1", at
        assert body.size == forward.LOOK + 700 + len(text)


async def test_strangers_see_no_address_of_a_replica() -> None:
    async with world("a", "b") as w:
        names = {"a", "b", *(fake.url for fake in w.fakes.values())}

        async def listed(path: str) -> tuple[int, set[str]]:
            status, text = await w.get(path)
            return status, {name for name in names if f'"{name}"' in text}

        assert await listed("/replicas") == (200, names), "no key is required"
        for fake in w.fakes.values():
            fake.locked = True
        for path in ("/health", "/ready", "/load"):
            assert await listed(path) == (200, set())
        assert await listed("/replicas") == (401, set())
        async with w.client.get(w.url + "/v1/responses/resp_a") as response:
            assert response.status == 401 and "x-spark-replica" not in response.headers
        for replica in w.fleet.replicas.values():
            w.fleet.miss(replica, "silent")
            replica.address = Address(replica.name, "http://127.0.0.1:9")
        names |= {"http://127.0.0.1:9"}
        assert await listed("/replicas") == (200, set()), "no replica can check the key"
        assert json.loads((await w.get("/load"))[1]) == {"server_load": 0}


async def test_pages_of_the_front_are_no_strangers_to_a_replica() -> None:
    async with world("a") as w:

        async def seen(**headers: str) -> set[str]:
            body = {"messages": ["hi"]}
            async with w.client.post(w.url + CHAT, json=body, headers=headers) as response:
                assert response.status == 200
            names = {name.lower() for name in w.fakes["a"].heads[-1]}
            return names & {"origin", "sec-fetch-site"}

        assert await seen(Origin=w.url, **{"Sec-Fetch-Site": "same-origin"}) == set()
        assert await seen(Origin="http://chat.example") == {"origin"}


async def test_bodies_share_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "SMALL_BODY", 100)
    monkeypatch.setattr(bodies, "LARGE_BODIES", 1000)
    async with world("a") as w:
        gate = asyncio.Event()
        w.front._bodies.most = 1000

        async def slow() -> AsyncIterator[bytes]:
            yield b" " * 900
            await gate.wait()
            yield b'{"messages": []}'

        first = asyncio.ensure_future(w.client.post(w.url + CHAT, data=slow()))
        await until(lambda: w.front._bodies.large == 800)
        status, found, _ = await w.ask("x" * 400)
        assert (status, found["error"]["code"]) == (503, "busy")
        assert (await w.ask("x"))[0] == 200, "small ones always fit"
        gate.set()
        assert (await first).status == 200
        assert w.front._bodies.large == 0 and (await w.ask("x" * 400))[0] == 200


async def test_one_body_of_the_most_allowed_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "SMALL_BODY", 100)
    monkeypatch.setattr(bodies, "LARGE_BODIES", 1000)
    async with world("a") as w:
        assert (await w.ask("x" * 5000))[0] == 200
        assert w.front._bodies.large == 0


async def test_a_body_is_dropped_as_soon_as_the_answer_begins() -> None:
    gone = []

    class Marked(bytes):
        def __del__(self) -> None:
            gone.append(True)

    async with world("a") as w:
        started = asyncio.Event()

        async def send(status: int, headers: Headers, part: bytes, more: bool) -> None:
            started.set()

        body = ReceivedBody(Bodies())
        body.parts = [Marked(json.dumps({"messages": ["HANG"], "stream": True}).encode())]
        asked = ClientRequest("POST", CHAT, CHAT, [], body, "", send)
        work = asyncio.ensure_future(w.front._forwarder.forward(asked))
        await started.wait()
        assert not work.done() and gone, "a long stream holds its prompt"
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_body_that_is_not_needed_again_is_dropped_when_it_is_sent(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "SMALL_BODY", 100)
    prompt = "WAIT " + "x" * 40000
    async with world("a") as w:
        alone = asyncio.ensure_future(w.ask(prompt, stream=stream))
        await until(lambda: len(w.fakes["a"].asked) == 1)
        assert w.front._bodies.large == 0, "one replica: there is no other try"
        await w.fleet.look()
        w.fakes["a"].gate.set()
        assert (await alone)[0] == 200
        assert w.fakes["a"].asked[0]["messages"][0]["content"] == prompt
        assert int(w.fakes["a"].heads[0]["Content-Length"]) > 40000


async def test_a_body_that_another_may_need_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "SMALL_BODY", 100)
    async with world("a", "b") as w:
        waits = asyncio.ensure_future(w.ask("WAIT " + "x" * 40000))
        await until(lambda: any(fake.asked for fake in w.fakes.values()))
        assert w.front._bodies.large > 39000
        for fake in w.fakes.values():
            fake.gate.set()
        assert (await waits)[0] == 200
        for word in ("DIE", "BUSY"):
            status, found, _ = await w.ask(f"{word} " + "y" * 40000)
            assert status == 503 and "error" in found
            assert sum(len(fake.asked) for fake in w.fakes.values()) == {"DIE": 3, "BUSY": 5}[word]
            await w.fleet.look()
        assert w.front._bodies.large == 0


async def test_headers_of_one_connection_stay_there() -> None:
    head = [("Connection", "keep-alive, X-Mine"), ("x-mine", "1"), ("x-other", "2")]
    assert passed(head, {"connection"}) == [("x-other", "2")]
    async with world("a") as w:
        mine = {"proxy-authorization": "Basic x", "te": "trailers", "upgrade": "h2c"}
        async with w.client.post(w.url + CHAT, json={}, headers=mine) as response:
            assert response.status == 200
        assert not {name.lower() for name in w.fakes["a"].heads[0]} & mine.keys()


async def test_a_retry_counts_if_there_is_another_replica() -> None:
    async with world("a") as w:
        for word in ("BUSY", "BROKEN"):
            await w.ask(word)
        text = (await w.get("/metrics"))[1]
        assert 'retries_total{why="refused"} 0.0' in text
        assert 'retries_total{why="lost"} 0.0' in text


class _Slow:
    """Replicas that answer slowly whether they store an id."""

    def __init__(self, status: int) -> None:
        self.asked: list[str] = []
        self.inside = self.most = 0
        self.status, self.holder, self.lost = status, "", 0

    async def get(self, url: str, limit_s: float, headers: Headers) -> tuple[int, bytes, Any]:
        self.asked.append(url)
        number = len(self.asked)
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            await asyncio.sleep(0.01)
        finally:
            self.inside -= 1
        if number == self.lost:
            raise Lost("away")
        return (200 if self.holder and self.holder in url else self.status), b""


def _forwarder(slow: _Slow, count: int) -> Forwarder:
    async def members() -> list[Address]:
        return []

    upstream = cast(Upstream, slow)
    fleet = Fleet(members, upstream, Router())
    for i in range(count):
        replica = Replica(Address(f"r{i}", f"http://r{i}:1"), up=True)
        fleet.replicas[replica.name] = replica
    return Forwarder(fleet, upstream, FrontMetrics())


def _asked(ident: str) -> ClientRequest:
    async def send(status: int, headers: Headers, part: bytes, more: bool) -> None:
        raise AssertionError("nothing is said yet")

    path = f"{RESPONSES}/{ident}"
    return ClientRequest("GET", path, path, [], ReceivedBody(Bodies()), "", send)


def test_stored_answers_are_searched_at_a_few_replicas_at_a_time() -> None:
    async def test() -> None:
        slow = _Slow(404)
        carrier = _forwarder(slow, 50)
        assert await asyncio.gather(*(carrier._owner(_asked("resp_a")) for _ in range(3))) == [
            None,
            None,
            None,
        ]
        assert len(slow.asked) == 150 and slow.most == forward.ASKING
        slow.holder, slow.lost = "r20:", 3
        slow.asked.clear()
        assert await carrier._owner(_asked("resp_a")) == "r20"
        assert len(slow.asked) < 50 and slow.inside == 0
        assert await carrier._owner(_asked("resp_a")) == "r20", "its replica is stored"
        slow.asked.clear()
        slow.status, slow.holder, slow.lost = 401, "", 0
        assert await carrier._owner(_asked("resp_b")) is None
        assert len(slow.asked) <= forward.ASKING, "an unknown client queries few replicas"

    leap(test())


def test_all_are_asked_within_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "ASK_S", 0.03)

    async def test() -> None:
        slow = _Slow(404)
        with pytest.raises(Unsure):
            await _forwarder(slow, 2000)._owner(_asked("resp_a"))
        assert len(slow.asked) < 500 and slow.inside == 0

    leap(test())


@pytest.mark.parametrize(("status", "lost"), [(404, 2), (503, 0)])
def test_an_answer_that_may_be_somewhere_is_asked_for_again(status: int, lost: int) -> None:
    said: list[tuple[int, Any]] = []

    async def send(status: int, headers: Headers, part: bytes, more: bool) -> None:
        assert b"stores this answer" in part
        said.append((status, dict(headers)))

    async def test() -> None:
        slow = _Slow(status)
        slow.lost = lost
        asked = _asked("resp_a")
        asked.send = send
        await _forwarder(slow, 3).forward(asked)
        assert slow.asked and said == [
            (503, {"content-type": "application/json", "retry-after": "1"})
        ]

    leap(test())


async def test_one_that_left_is_looked_at_until_it_has_nothing() -> None:
    async with world("a", "b") as w:
        stream = asyncio.create_task(w.ask("HANG", stream=True))
        await until(lambda: w.fleet.router.open == {"a": 1, "b": 0})
        fake = w.fakes.pop("a")
        await w.fleet.look()
        assert list(w.fleet.leaving) == ["a"] and [r.name for r in w.fleet.up] == ["b"]
        w.hang(fake)  # as if its machine were lost: no side closes the connection
        for _ in range(MISSES):
            assert not stream.done()
            await w.fleet.look()
        assert "replica_lost" in (await stream)[1]
        await w.fleet.look()
        assert not w.fleet.leaving and w.fleet.router.open == {"b": 0}


async def test_one_that_comes_back_has_what_it_had() -> None:
    async with world("a") as w:
        waits = asyncio.create_task(w.ask("WAIT"))
        await until(lambda: w.fleet.router.open == {"a": 1})
        fake, had = w.fakes.pop("a"), w.fleet.replicas["a"]
        await w.fleet.look()
        w.fakes["a"] = fake
        await w.fleet.look()
        assert w.fleet.replicas["a"] is had and had.up and not w.fleet.leaving
        fake.gate.set()
        assert (await waits)[0] == 200
