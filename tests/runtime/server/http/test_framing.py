"""What of HTTP/1.1 is refused, and that no form of a request keeps the event loop."""

import asyncio
import json
import socket
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from spark_engine.runtime.server.api.stored_items import store_items
from spark_engine.runtime.server.http import framing
from spark_engine.runtime.server.http.connections import Connection, Connections
from spark_engine.runtime.server.service.stored_responses import MOST_ONE
from tests.loop_watch import LIMIT_S, Longest, watched
from tests.runtime.server.api.api_client import ApiClient

HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
MIB = 1 << 20


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the size of the body."""
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size, more = size + len(message["body"]), message["more_body"]
    body = f"<{size}>".encode()
    length = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": length})
    await send({"type": "http.response.body", "body": body})


def _say(port: int, parts: list[bytes]) -> bytes:
    """The whole output of a server to a client that sends these and then reads to the end."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        try:
            for part in parts:
                client.sendall(part)
            client.settimeout(60)
        except (ConnectionResetError, BrokenPipeError):
            pass  # it has closed; its output may still arrive
        said: list[bytes] = []
        try:
            while part := client.recv(1 << 16):
                said.append(part)
        except ConnectionResetError:
            pass
        return b"".join(said)


def serve(*parts: bytes, app: Any = app) -> tuple[bytes, Longest]:
    """The output of a server of this application for these bytes, and its longest callback."""

    async def run() -> bytes:
        loop = asyncio.get_running_loop()
        config, state = uvicorn.Config(app, log_config=None, lifespan="off"), ServerState()
        made = Connections(10, read_s=60.0)
        config.load()

        def connection() -> Connection:
            return Connection(made, config=config, server_state=state, app_state={})

        server = await loop.create_server(connection, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await asyncio.to_thread(_say, port, list(parts))

    with watched() as longest:
        said = asyncio.run(run())
    return said, longest


LAST = HEAD + b"connection: close\r\ncontent-length: 0\r\n\r\n"
CHUNK = b"%x\r\n" % 4096 + b"x" * 4096 + b"\r\n"
ENDS = b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
SLOW_FORMS = {
    "chunks of a byte": [CHUNKED, b"1\r\nx\r\n" * (MIB // 6)],
    "chunks of a byte, with an extension": [CHUNKED, b"1;a=b\r\nx\r\n" * (MIB // 10)],
    "chunks in their number's longest form": [CHUNKED, b"%020x\r\nx\r\n" % 1 * (MIB // 25)],
    "many requests at once": [GET * 1000, LAST],
    "many requests with bodies": [(CHUNKED + b"1\r\nx\r\n0\r\n\r\n") * 500, LAST],
    "tiny headers": [HEAD + b"a:\r\n" * (MIB // 4) + b"\r\n"],
    "one folded header": [HEAD + b"a:\r\n" + b" b\r\n" * (MIB // 4) + b"\r\n"],
    "empty lines": [b"\r\n" * (MIB // 2)],
    "a trailer of tiny headers": [CHUNKED, b"0\r\n" + b"a:\r\n" * (MIB // 4) + b"\r\n"],
    "a head without an end": [HEAD + b"a" * MIB],
}


@pytest.mark.parametrize("name", SLOW_FORMS)
def test_no_form_of_a_request_keeps_the_loop(name: str) -> None:
    said, longest = serve(*SLOW_FORMS[name])
    assert longest.seconds < LIMIT_S, longest
    if name.startswith("many"):
        asked = sum(part.count(b"HTTP/1.1") for part in SLOW_FORMS[name])
        assert said.count(b"HTTP/1.1 200") == asked
    elif said:  # a client that was sending when the server closed may not see it
        assert said.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 "))


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_comes_whole(chunked: bool) -> None:
    size = 32 * MIB
    if chunked:
        head, body = CHUNKED, CHUNK * (size // 4096) + b"0\r\n\r\n"
    else:
        head, body = HEAD + b"content-length: %d\r\n\r\n" % size, b"x" * size
    said, longest = serve(head.replace(b"host: x", b"host: x\r\nconnection: close"), body)
    assert said.endswith(b"<%d>" % size)
    assert longest.seconds < LIMIT_S, longest


def test_a_short_body_may_come_in_any_chunks() -> None:
    """As of clients that send what their JSON encoder yields."""
    count = framing.FREE_CHUNKS
    closing = CHUNKED.replace(b"host: x", b"host: x\r\nconnection: close")
    said, _ = serve(closing, b"1\r\nx\r\n" * count, b"0\r\n\r\n")
    assert said.endswith(b"<%d>" % count)
    said, _ = serve(closing, b"1\r\nx\r\n" * (count + 1))
    assert b"chunks of at least 64 bytes on average" in said


NONE = b"\r\n\r\n0\r\n\r\n"
UNFIT = {
    "a length and chunks": HEAD + b"content-length: 4\r\ntransfer-encoding: chunked" + NONE,
    "chunks and a length": HEAD + b"transfer-encoding: chunked\r\ncontent-length: 4" + NONE,
    "cases": HEAD + b"CONTENT-length: 4\r\nTransfer-ENCODING: Chunked" + NONE,
    "two lengths": HEAD + b"content-length: 4\r\ncontent-length: 5\r\n\r\nabcde",
    "chunks of HTTP/1.0": CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + b"0\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n",
    "another server's target": b"GET http://evil.example/ HTTP/1.1\r\nhost: x\r\n\r\n",
    "no path": b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n",
    "an authority": b"CONNECT evil.example:80 HTTP/1.1\r\nhost: x\r\n\r\n",
    "HTTP/0.9": b"GET / HTTP/0.9\r\nhost: x\r\n\r\n",
    "HTTP/2.0": b"GET / HTTP/2.0\r\nhost: x\r\n\r\n",
    "space before the colon": HEAD + b"content-length : 4\r\n\r\nabcd",
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_another_parser_may_read_differently_is_refused(name: str) -> None:
    said, _ = serve(UNFIT[name] + GET)
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and b"connection: close" in head
    assert said.count(b"HTTP/1.1 ") == 1, "what is behind it is not read"
    assert json.loads(body)["error"]["code"] == "invalid_http"


def test_the_number_of_headers_is_bounded() -> None:
    most = framing.MOST_HEADERS - 2
    end = b"connection: close\r\n\r\n"
    assert serve(GET[:-2] + b"a: b\r\n" * most + end)[0].startswith(b"HTTP/1.1 200 ")
    assert serve(GET[:-2] + b"a: b\r\n" * (most + 1) + end)[0].startswith(b"HTTP/1.1 431 ")
    long = GET[:-2] + b"a: " + b"b" * framing.MOST_HEAD + b"\r\n" + b"c: d\r\n" * 1000 + end
    assert serve(long)[0].startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("end", ["", "/input_items"])
def test_the_largest_response_that_is_stored_is_sent_without_keeping_the_loop(end: str) -> None:
    server = ApiClient("Hello")
    before = store_items([{"role": "user", "content": "x" * (MOST_ONE - 200)}])
    head = {"id": "resp_1", "output": [], "instructions": "x" * 32 * MIB}
    server.service.responses.put(head, before, "", lambda: None)
    said, longest = serve(b"GET /v1/responses/resp_1" + end.encode() + ENDS, app=server.app)
    assert said.startswith(b"HTTP/1.1 200 ") and len(said) > 31 * MIB
    assert longest.seconds < LIMIT_S, longest
