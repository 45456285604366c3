"""The front with fake replicas, over real sockets: routes, retries, breaks, leaving replicas."""

import asyncio
import json

import pytest
from yarl import URL

from spark_engine.errors import OptionError
from spark_engine.runtime.replicas.fleet import MISSES, Address, listed
from tests.runtime.replicas.front_world import CHAT, MESSAGES, MOST, RESPONSES, until, world


async def test_an_answer_names_its_replica() -> None:
    async with world("a", "b") as w:
        head = {"authorization": "Bearer k", "x-request-id": "mine", "x-own": "é"}
        body = {"prompt": "hi", "n": 1}
        async with w.client.post(w.url + CHAT, json=body, headers=head) as response:
            found = await response.json()
            assert (response.status, found["from"]) == (200, response.headers["x-spark-replica"])
            assert response.headers.getall("x-request-id") == ["mine"]
        fake = w.fakes[found["from"]]
        assert fake.asked == [body]
        seen = {k.lower(): v for k, v in fake.heads[0].items()}
        assert seen["authorization"] == "Bearer k" and seen["x-request-id"] == "mine"
        assert seen["host"] in fake.url


async def test_events_come_as_they_are_made() -> None:
    async with world("a") as w:
        body = {"messages": ["HANG"], "stream": True}
        async with w.client.post(w.url + CHAT, json=body) as response:
            first = await asyncio.wait_for(response.content.readany(), 60)
            assert first == b'data: {"text": "one ", "by": "a"}\n\n'
            assert response.headers["content-type"].startswith("text/event-stream")
            assert w.fleet.router.open == {"a": 1}
        await until(lambda: w.fakes["a"].left == 1 and w.fleet.router.open == {"a": 0})
        status, text, _ = await w.ask("hi", stream=True)
        assert (status, text.count("data:"), text[-14:]) == (200, 4, "data: [DONE]\n\n")


async def test_a_client_that_disconnects_ends_its_request_at_the_replica() -> None:
    async with world("a") as w:
        asking = asyncio.create_task(w.ask("WAIT"))
        await until(lambda: w.fleet.router.open == {"a": 1})
        asking.cancel()
        await until(lambda: w.fakes["a"].left == 1 and w.fleet.router.open == {"a": 0})


async def test_conversations_stay_where_they_are() -> None:
    async with world("a", "b", "c") as w:
        first = {}
        for i in range(6):
            asked = [{"role": "user", "content": f"{i}" * 5000}]
            _, _, first[i] = await w.ask("", messages=asked)
        assert sorted(first.values()) == ["a", "a", "b", "b", "c", "c"]
        for i, name in first.items():
            more = [{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]
            asked = [{"role": "user", "content": f"{i}" * 5000}, *more]
            assert (await w.ask("", messages=asked))[2] == name
        _, text = await w.get("/metrics")
        assert "spark_front_requests_total 12.0" in text
        assert "spark_front_shared_prompt_bytes_total 30" in text, "5,000 bytes and more of six"


@pytest.mark.parametrize("word", ["DIE", "BROKEN"])
async def test_a_replica_that_breaks_before_the_first_token_is_tried_once_more(word: str) -> None:
    async with world("a", "b", "c") as w:
        status, found, _ = await w.ask(word)
        asked = [mark for mark, fake in w.fakes.items() if fake.asked]
        assert (status, len(asked)) == (503, 2), "a request that breaks engines breaks two"
        assert found["error"]["code"] == "no_replica"
        assert "send the request again" in found["error"]["message"]
        (rest,) = w.fakes.keys() - set(asked)
        if word == "DIE":  # a server that still answers is kept
            assert [r.name for r in w.fleet.up] == [rest]
            await w.fleet.look()
        assert len(w.fleet.up) == 3
        assert 'spark_front_retries_total{why="lost"} 1.0' in (await w.get("/metrics"))[1]


async def test_nothing_is_lost_with_a_replica_that_is_gone() -> None:
    async with world("a", "b") as w:
        w.fleet.replicas["a"].address = Address("a", "http://127.0.0.1:1")
        for _ in range(4):
            status, found, _ = await w.ask("hi")
            assert (status, found["from"]) == (200, "b")


async def test_a_refused_request_goes_elsewhere_and_fails_at_last() -> None:
    async with world("a", "b") as w:
        status, found, _ = await w.ask("BUSY")
        assert (status, found["error"]["code"]) == (503, "busy")
        assert [len(fake.asked) for fake in w.fakes.values()] == [1, 1]
        assert len(w.fleet.up) == 2, "it is busy, not broken"


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        (CHAT, b'"code":"replica_lost"'),
        (MESSAGES, b"event: error\ndata: {"),
        (RESPONSES, b'event: error\ndata: {"type":"error","code":"replica_lost"'),
    ],
)
async def test_a_broken_stream_ends_in_an_error_of_its_api(path: str, wanted: bytes) -> None:
    async with world("a", "b") as w:
        status, text, _ = await w.ask("HALF", path, stream=True)
        assert status == 200 and "never" not in text
        *events, rest = text.split("\n\n")
        assert rest == "" and wanted.decode() in text
        for row in events:
            assert row.count("data: ") == 1, "half an event precedes it"
            data = row.partition("data: ")[2]
            assert data == "[DONE]" or json.loads(data)
        assert len([r for r in events if '"by"' in r]) == 2
        assert sum(len(fake.asked) for fake in w.fakes.values()) == 1, "a part of it was received"
        assert "spark_front_broken_answers_total 1.0" in (await w.get("/metrics"))[1]


async def test_a_replica_that_hangs_is_given_up() -> None:
    async with world("a", "b") as w:
        stream = asyncio.create_task(w.ask("HANG", stream=True))
        await until(lambda: w.fleet.router.open == {"a": 1, "b": 0})
        waits = asyncio.create_task(w.ask("WAIT"))
        await until(lambda: w.fleet.router.open == {"a": 1, "b": 1})
        w.fakes["b"].gate.set()
        assert (await waits)[2] == "b"
        w.hang(w.fakes["a"])
        for _ in range(MISSES - 1):
            await w.fleet.look()
        assert not stream.done() and [r.name for r in w.fleet.up] == ["b"]
        await w.fleet.look()
        _, text, _ = await stream
        assert '"one "' in text and "replica_lost" in text
        w.fakes["a"].hung = False
        await w.fleet.look()
        assert len(w.fleet.up) == 2 and w.fleet.router.open == {"a": 0, "b": 0}


async def test_one_that_listens_no_more_ends_what_it_has() -> None:
    async with world("a") as w:
        waits = asyncio.create_task(w.ask("WAIT"))
        await until(lambda: w.fleet.router.open == {"a": 1})
        w.fleet.replicas["a"].address = Address("a", "http://127.0.0.1:1")
        for _ in range(MISSES + 1):
            await w.fleet.look()
        assert not w.fleet.up and not waits.done()
        w.fakes["a"].gate.set()
        assert (await waits)[0] == 200


async def test_health_is_that_of_the_best() -> None:
    async with world("a", "b") as w:
        assert (await w.get("/health"))[0] == 200
        w.fakes["a"].healthy = False
        await w.fleet.look()
        status, text = await w.get("/ready")
        assert (status, json.loads(text)["up"]) == (200, 1)
        assert {(await w.ask("hi"))[2] for _ in range(3)} == {"b"}
        w.fakes["b"].healthy = False
        await w.fleet.look()
        assert (await w.get("/health"))[0] == 503
        status, found, _ = await w.ask("hi", MESSAGES)
        assert (status, found["type"]) == (503, "error")
        rows = json.loads((await w.get("/replicas"))[1])["replicas"]
        assert [row["up"] for row in rows] == [False, False] and "unhealthy" in rows[0]["why"]


async def test_one_that_leaves_ends_what_it_has() -> None:
    async with world("a", "b") as w:
        waits = asyncio.create_task(w.ask("WAIT"))
        await until(lambda: 1 in w.fleet.router.open.values())
        (name,) = (n for n, count in w.fleet.router.open.items() if count)
        fake = w.fakes.pop(name)
        await w.fleet.look()
        assert name not in w.fleet.replicas and {(await w.ask("hi"))[2]} == set(w.fakes)
        fake.gate.set()
        assert (await waits)[0] == 200
        assert name not in w.fleet.router.open


async def test_a_kept_answer_is_found_at_its_replica() -> None:
    async with world("a", "b", "c") as w:
        _, found, name = await w.ask("hi", RESPONSES)
        ident = found["id"]
        for _ in range(2):
            assert json.loads((await w.get(f"/v1/responses/{ident}"))[1])["from"] == name
        for _ in range(3):
            assert (await w.ask("more", RESPONSES, previous_response_id=ident))[2] == name
        assert (await w.ask("more", RESPONSES, previous_response_id="../models"))[0] == 200
        assert "../models" not in w.front._forwarder._kept
        assert not any("models" in path for f in w.fakes.values() for path in f.looked)
        w.front._forwarder._kept.clear()  # as after a restart of the front
        assert (await w.ask("more", RESPONSES, previous_response_id=ident))[2] == name
        assert (await w.get("/v1/responses/resp_none"))[0] == 404


async def test_metrics_are_everybodys() -> None:
    async with world("a", "b") as w:
        status, text = await w.get("/metrics")
        assert status == 200
        rows = [line for line in text.splitlines() if line.startswith(("a_", "b_", "# HELP a"))]
        assert rows == [
            "# HELP a words",
            'a_total{replica="a"} 2.0',
            'a_total{replica="b"} 2.0',
            'b_bucket{replica="a",le="1",m="a"} 3',
            'b_count{replica="a"} 4',
            'b_bucket{replica="b",le="1",m="b"} 3',
            'b_count{replica="b"} 4',
        ]
        assert text.count("# TYPE b histogram") == 1
        assert 'spark_front_replica_up{replica="b"} 1.0' in text


async def test_a_client_without_access_sees_no_metrics() -> None:
    async with world("a", "locked") as w:
        assert (await w.get("/metrics"))[0] == 401
        status, text = await w.get("/metrics", authorization="Bearer k")
        assert status == 200 and 'm="locked"' in text


async def test_a_body_is_bounded() -> None:
    async with world("a") as w:
        status, found, _ = await w.ask("x" * MOST)
        assert (status, str(MOST) in found["error"]["message"]) == (413, True)
        assert not w.fakes["a"].asked


@pytest.mark.parametrize("line", ["GET @{}/v1/models", "OPTIONS *"])
async def test_a_target_is_a_path_of_a_replica_and_no_other_server(line: str) -> None:
    async with world("a") as w:
        foreign, at = 0, w.url.removeprefix("http://").partition(":")

        async def came(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal foreign
            foreign += 1
            writer.close()

        server = await asyncio.start_server(came, "127.0.0.1", 0)
        where = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        reader, writer = await asyncio.open_connection(at[0], int(at[2]))
        words = f"{line.format(where)} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        writer.write(words.encode())
        answer = await reader.read()
        writer.close()
        server.close()
        assert answer.startswith(b"HTTP/1.1 400") and not foreign
        assert len(w.fleet.up) == 1, "that was the client's mistake"


async def test_a_path_is_passed_on_as_it_came() -> None:
    async with world("a") as w:
        ident = "resp_%2e%41"
        w.fakes["a"].kept.add("resp_.A")
        url = URL(f"{w.url}/v1/responses/{ident}?q=%41", encoded=True)
        async with w.client.get(url) as response:
            assert (response.status, (await response.json())["target"]) == (
                200,
                f"/v1/responses/{ident}?q=%41",
            )


def test_addresses_are_read() -> None:
    assert asyncio.run(_members("http://a:1", "http://b:2/")) == [
        Address("a:1", "http://a:1"),
        Address("b:2", "http://b:2"),
    ]
    (found,) = {a.url for a in asyncio.run(_members("dns://localhost:81")) if "[" not in a.url}
    assert found == "http://127.0.0.1:81"
    for wrong in ("a:1", "https://a", "http://a/v1", "http://", "http://a:x"):
        with pytest.raises(OptionError, match="is not an address"):
            listed([wrong])


async def _members(*urls: str) -> list[Address]:
    return list(await listed(urls)())
