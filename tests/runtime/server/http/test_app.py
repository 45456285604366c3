"""The HTTP face without an engine: keys, bodies, paths, names of requests, other origins."""

import asyncio
import contextlib
import gzip
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest
import zstandard
from fastapi import Request

from spark_engine.runtime.engine.request import Event
from spark_engine.runtime.server.http import bodies as module
from spark_engine.runtime.server.http.endpoints import Endpoints
from spark_engine.runtime.server.http.routes import ROUTES
from spark_engine.runtime.server.operation.keys import Keyring
from spark_engine.runtime.server.replies import completions
from tests.runtime.fake_client import FakeClient, service
from tests.runtime.server.api.api_client import ApiClient

KEY = "Secret-clé"


OPENS = (f"Bearer {KEY}", f"bearer {KEY}", f"BEARER  {KEY} ")
WRONG = [f"Bearer {key}" for key in (KEY[:-1], KEY + "x", KEY.lower(), KEY.upper(), "")]
WRONG += [f"Basic {KEY}", f"Bearer{KEY}", KEY, "Bearer", ""]


@pytest.mark.parametrize("given", [*OPENS, *WRONG, None])
def test_only_the_whole_key_opens(given: str | None) -> None:
    head: Any = {} if given is None else {"authorization": given.encode()}
    server = ApiClient(keys=Keyring(None, KEY))
    assert server.get("/health", **head).status_code == 200
    assert server.get("/v1/models", **head).status_code == (200 if given in OPENS else 401)


async def _parts(
    count: int, size: int, came: asyncio.Event | None = None, gate: asyncio.Event | None = None
) -> AsyncIterator[bytes]:
    """`came`: all parts were taken; the end waits for `gate`."""
    for _ in range(count):
        yield b" " * size
    if came is not None and gate is not None:
        came.set()
        await gate.wait()


async def test_a_body_over_the_limit_is_refused_before_or_while_it_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_BODY", 1000)

    async def ask(content: Any, **headers: str) -> tuple[int, str]:
        async with ApiClient().http() as client:
            answer = await client.post("/v1/completions", content=content, headers=headers)
            return answer.status_code, answer.json()["error"]["message"]

    assert await ask(b" " * 1000) == (400, (await ask(b""))[1])
    assert (await ask(_parts(3, 400)))[0] == 413
    for declared in ("1001", "9" * 5000):  # nothing of it has to come
        assert (await ask(_parts(0, 0), **{"Content-Length": declared}))[0] == 413


async def test_large_bodies_share_their_memory_and_small_ones_always_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SMALL_BODY", 100)
    monkeypatch.setattr(module, "LARGE_BODIES", 1000)
    monkeypatch.setattr(module, "MAX_BODY", 1000)

    came, gate = asyncio.Event(), asyncio.Event()
    async with ApiClient().http() as client:
        ask = partial(client.post, "/v1/completions")
        first = asyncio.ensure_future(ask(content=_parts(10, 90, came, gate)))
        await came.wait()
        found = [(await ask(content=b" " * size)).status_code for size in (100, 250, 350)]
        gate.set()  # 800 of 1000 were taken
        await first
        found.append((await ask(content=b" " * 900)).status_code)
    assert found == [400, 400, 503, 400]


async def test_a_client_that_leaves_before_the_first_event_leaves_nothing_behind() -> None:
    """The body of a stream that was never started does not close its reply."""
    client = FakeClient([Event(0, 40)])
    served = service(client, None)
    endpoints = Endpoints(served)
    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    body = b'{"prompt": [5], "stream": true, "return_token_ids": true}'
    answers = iter([{"type": "http.request", "body": body}])

    async def receive() -> Any:
        with contextlib.suppress(StopIteration):
            return next(answers)
        await began.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        began.set()
        await asyncio.Event().wait()  # no byte of it is sent

    began = asyncio.Event()
    request = Request(scope, receive)
    response = await endpoints.generate(request, completions.start)
    assert client.cancelled == []
    await asyncio.wait_for(response(scope, receive, send), 60)
    assert client.cancelled == [0], "at once, and not at the next garbage collection"


def test_a_path_that_is_not_served_says_what_is() -> None:
    served = ApiClient("x")
    answer = served.get("/v1/nothing")
    words = answer.json()["error"]["message"]
    assert answer.status_code == 404 and words.startswith("there is no /v1/nothing here; there is ")
    assert all(path in words for path in ("/v1/chat/completions", "/v1/messages", "/v1/models"))
    for path, wanted in (
        ("/v1/embeddings", "has no embeddings"),
        ("/rerank", "serve a reranking model"),
        ("/v1/audio/speech", "serve a model of speech"),
        ("/v1/images/generations", "serve a model of images"),
        ("/v1/threads/t1/runs", "use /v1/responses"),
        ("/api/chat", "use /v1/chat/completions"),
    ):
        answer = served.get(path, "POST")
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (404, "not_supported"), path
        assert error["message"].startswith(f"{path} is not served here: ")
        assert wanted in error["message"]
    for path in ("/v1/chat/completions", "/v1/messages"):
        answer = served.get(path)
        assert answer.status_code == 405
        assert answer.json()["error"]["message"] == f"{path} takes POST, not GET"
    assert served.get("/v1/models", "POST").status_code == 405


def test_every_request_has_a_name() -> None:
    served = ApiClient("x")
    for given in ("abc-123", "a/b:c"):
        answer = served.get("/v1/nothing", **{"x-request-id": given})
        assert answer.headers.get_list("x-request-id") == [given]
        assert answer.json()["request_id"] == given
    made = set()
    for given in ("", "a b", "x" * 129, "a\tb", "\"'"):
        answer = served.get("/v1/nothing", **({"x-request-id": given} if given else {}))
        made.add(answer.headers["x-request-id"])
        assert answer.json()["request_id"] == answer.headers["x-request-id"]
    assert len(made) == 5 and all(name.startswith("req_") for name in made)
    answer = served.post("/v1/completions", {"prompt": "a"})
    assert answer.headers["x-request-id"].startswith("req_")


def test_an_internal_error_has_its_requests_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret")

    served = ApiClient("x")
    monkeypatch.setattr(completions, "CompletionFormat", broken)
    answer = served.post("/v1/completions", {"prompt": "a"}, **{"x-request-id": "mine"})
    assert (answer.status_code, answer.json()["request_id"]) == (500, "mine")
    assert "secret" not in answer.text and "RuntimeError" in answer.text
    assert "in request mine" in caplog.text


def test_other_origins_are_let_in_where_they_are_named() -> None:
    page = {"origin": "http://page"}
    asked = {**page, "access-control-request-method": "POST"}
    asked["access-control-request-headers"] = "authorization, content-type, x-stainless-os"
    path = "/v1/chat/completions"
    closed = ApiClient("x").get(path, "OPTIONS", **asked)
    assert closed.status_code == 405 and "access-control-allow-origin" not in closed.headers
    for origins, wanted in ((["http://page"], "http://page"), (["*"], "*")):
        served = ApiClient("x", origins=origins, keys=Keyring(None, "k"))
        early = served.get(path, "OPTIONS", **asked)  # a browser sends no key with this one
        assert early.status_code == 200
        assert early.headers["access-control-allow-origin"] == wanted
        assert "x-stainless-os" in early.headers["access-control-allow-headers"]
        refused = served.post(path, {}, **page)
        assert refused.status_code == 401  # and the page may read why
        assert refused.headers["access-control-allow-origin"] == wanted
        assert "x-request-id" in refused.headers["access-control-expose-headers"]
    other = ApiClient("x", origins=["http://page"]).get(
        path, "OPTIONS", **asked | {"origin": "http://q"}
    )
    assert other.status_code == 400 and "access-control-allow-origin" not in other.headers


READING = [row.path for row in ROUTES if row.body is not None]
BODIES = {"/v1/completions": {"prompt": "a"}, "/tokenize": {"prompt": "a"}}
BODIES |= {"/detokenize": {"tokens": [65]}, "/v1/responses": {"input": "hi"}}


@pytest.mark.parametrize("path", READING)
def test_every_path_reads_its_body_in_the_pool(path: str) -> None:
    """In the loop's thread one of 32 MB would delay the tokens of all requests for a second."""
    server, user = ApiClient("x"), [{"role": "user", "content": "hi"}]
    body = BODIES.get(path, {"messages": user, "max_tokens": 2})
    assert server.post(path, body).status_code == 200
    assert len(server.service._pool.jobs) == 1  # type: ignore[attr-defined]


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "GZIP": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstandard.compress,
}


@pytest.mark.parametrize("encoding", PACKERS)
def test_compressed_bodies_are_read_within_the_limit(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack, served, head = PACKERS[encoding], ApiClient("hello"), {"content-encoding": encoding}
    body = pack(b'{"prompt": "a bear", "max_tokens": 9}')
    assert served.post("/v1/completions", body, **head).json()["choices"][0]["text"] == "hello"
    for bad in (b"no" + body, body[:-1]):  # all of the JSON is in the second one
        broken = served.post("/v1/completions", bad, **head)
        assert broken.status_code == 400 and "is not valid" in broken.json()["error"]["message"]
    monkeypatch.setattr(module, "MAX_BODY", 100_000)
    served = ApiClient("hello")
    bomb = pack(b'{"prompt": "' + b"a" * 50_000_000)
    assert len(bomb) < 100_000
    tracemalloc.start()
    assert served.post("/v1/completions", bomb, **head).status_code == 413
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_a_body_may_be_packed_in_several_pieces(encoding: str) -> None:
    pack, served, head = PACKERS[encoding], ApiClient("hello"), {"content-encoding": encoding}
    body = pack(b'{"prompt": "a bear", ') + pack(b"") + pack(b'"max_tokens": 9}')
    assert served.post("/v1/completions", body, **head).json()["choices"][0]["text"] == "hello"
    assert served.post("/v1/completions", body[:-14], **head).status_code == 400


def test_unpacking_takes_a_bounded_memory() -> None:
    wide = zstandard.ZstdCompressionParameters(window_log=27, enable_ldm=True)
    body = zstandard.ZstdCompressor(compression_params=wide).compress(b" " * (16 << 20))
    answer = ApiClient("x").post("/v1/completions", body, **{"content-encoding": "zstd"})
    assert answer.status_code == 400 and "not valid zstd" in answer.json()["error"]["message"]


def test_no_body_holds_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, sleep = [], asyncio.sleep

    async def counted(seconds: float) -> None:
        turns.append(seconds)
        await sleep(seconds)

    monkeypatch.setattr(module.asyncio, "sleep", counted)
    for encoding in ("gzip", "zstd"):
        turns.clear()
        body = PACKERS[encoding](b'{"prompt": "a"}' + b" " * (16 << 20))
        answer = ApiClient("x").post("/v1/completions", body, **{"content-encoding": encoding})
        assert answer.status_code == 200 and len(turns) >= 4


def test_an_unknown_compression_is_named() -> None:
    answer = ApiClient("x").post("/v1/completions", b"x", **{"content-encoding": "br"})
    assert (answer.status_code, "'br'" in answer.json()["error"]["message"]) == (415, True)


def test_load_and_readiness() -> None:
    served = ApiClient("x")
    assert served.get("/load").json() == {"server_load": 0, "running": 0, "waiting": 0}
    assert served.get("/ready").status_code == 200
    served.client.in_flight = 8  # 4 slots and a queue of 4
    assert served.get("/load").json()["server_load"] == 8
    answer = served.get("/ready")
    assert answer.status_code == 503 and "limit is 8" in answer.json()["reason"]
    assert served.get("/health").status_code == 200
    served.client.in_flight = 0
    served.client.unhealthy_reason = lambda: "it hangs"  # type: ignore[method-assign]
    assert served.get("/ready").json()["reason"] == "it hangs"
