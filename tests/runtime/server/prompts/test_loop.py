"""No body within the limits holds the event loop up for 50 ms, whatever is in it.

The bodies go through the whole application and real workers; a watchdog measures every callback of
the loop. A client that disconnects at any stage leaves nothing running.
"""

import asyncio
import gzip
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from spark_engine.runtime.engine.request import Event, FinishReason
from spark_engine.runtime.server.http.app import create_app
from spark_engine.runtime.server.http.endpoints import Endpoints
from spark_engine.runtime.server.prompts.pool import WorkerPool
from spark_engine.runtime.text.chat import ChatTemplate
from spark_engine.runtime.text.tokenizer import Tokenizer
from tests.loop_watch import LIMIT_S, watched
from tests.patient import until
from tests.runtime.fake_client import FakeClient, service
from tests.runtime.server.api.api_client import CHAT, RESPONSES, TEXT, USER
from tests.runtime.server.prompts import served_folder
from tests.runtime.server.prompts.served_folder import LOOP, TEMPLATE

CHUNK = 64 << 10  # bytes that uvicorn hands on at a time
MIB = 1 << 20
HALF = b"\\ud800" * (MIB // 6)
END = (Event(0, 40, finish=FinishReason.LENGTH),)


class App:
    """The application over a fake engine and real workers."""

    def __init__(self, runner: asyncio.Runner, pool: WorkerPool, folder: Path) -> None:
        self.run, self.pool = runner.run, pool
        self.client = FakeClient(END)
        self.client.max_queue = 64
        tokenizer = Tokenizer.load(folder / "tokenizer")
        template = ChatTemplate(TEMPLATE)
        options: Any = {"template": template, "pool": pool, "context": 2048}
        self.service = service(self.client, tokenizer, **options)
        self.app: FastAPI = create_app(Endpoints(self.service))

    async def post(
        self, path: str, body: bytes, gone: asyncio.Event | None = None, **headers: str
    ) -> tuple[int, bytes]:
        """(status, body) of one request with a body in pieces. `gone`: the client disconnects."""
        pieces = [body[at : at + CHUNK] for at in range(0, len(body), CHUNK)] or [b""]
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(0)
            if pieces:
                data = pieces.pop(0)
                return {"type": "http.request", "body": data, "more_body": bool(pieces)}
            await (gone or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        rows = [(name.encode(), value.encode()) for name, value in headers.items()]
        scope = {
            **{"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http"},
            **{"method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""},
            **{"headers": rows, "client": ("127.0.0.1", 1), "server": ("x", 80), "root_path": ""},
        }
        await self.app(scope, receive, send)
        parts = [m.get("body", b"") for m in sent if m["type"] == "http.response.body"]
        return sent[0]["status"], b"".join(parts)


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    folder = served_folder.write(tmp_path_factory.mktemp("engine"))
    with served_folder.running(folder) as (runner, pool):
        yield App(runner, pool, folder)


def _repeated(
    path: str, before: str, part: str, after: str = "]}", size: int = MIB
) -> tuple[str, bytes]:
    """A body of this size, or of a megabyte, with as many of the parts as fit."""
    count = (size - len(before) - len(after)) // (len(part) + 1)
    return path, (before + ",".join([part] * count) + after).encode()


def _sent(path: str = CHAT, **fields: Any) -> tuple[str, bytes]:
    body = {"messages": USER} if path == CHAT else {}
    return path, json.dumps({**body, **fields}).encode()


def _nasty() -> dict[str, tuple[str, bytes]]:
    ref = {"$ref": "#/$defs/a"}
    schema = {"type": "object", "$defs": {"a": {"anyOf": [ref] * 12}}, "properties": {"x": ref}}
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}
    rows = {
        **{f"p{i}": {"$ref": "#"} for i in range(12)},
        "x": {"type": "string", "maxLength": 10**6},
    }
    wide = {"type": "object", "properties": rows}
    functions = ({"name": f"f{i}", "parameters": wide} for i in range(900))
    many = [{"type": "function", "function": function} for function in functions]
    items, text = b'{"items":' * 900 + b"{}" + b"}" * 900, "word " * (MIB // 5)
    shown, ids = '{"n":1,"return_token_ids":true,"prompt":[', f"[{'1,' * 2000}1]"
    junk = '{"input":[{"role":"user","content":"hi","x":['
    return {
        "messages that are empty": _repeated(CHAT, '{"messages":[', "{}"),
        "prompts that are empty": _repeated(TEXT, '{"prompt":[', "[]"),
        "a field that is not known": _repeated(TEXT, '{"prompt":"a","junk":[', "{}"),
        "ids to stop at": _repeated(TEXT, '{"prompt":"a","stop_token_ids":[', "1"),
        "ids as a prompt": _repeated(TEXT, '{"prompt":[', "1", '],"n":8}'),
        "prompts of ids": _repeated(TEXT, shown, ids, size=8 * 4010),
        "items that are empty": _repeated(RESPONSES, '{"input":[', "{}"),
        "items with junk": _repeated(RESPONSES, junk, "{}", "]}]}"),
        "tools that are repeated": _repeated(
            RESPONSES, '{"input":"hi","tool_choice":"none","metadata":{"x":[', "{}", "]}}"
        ),
        "a deep nest": (CHAT, b'{"messages":' + b"[" * MIB + b"]" * MIB + b"}"),
        "a deep schema": (CHAT, _sent()[1][:-1] + b',"guided_json":' + items + b"}"),
        "a schema that refers to itself": _sent(tools=[tool], tool_choice="required"),
        "many tools": _sent(tools=many, tool_choice="required"),
        "a long text that is cut": _sent(TEXT, prompt=[text] * 2, truncate_prompt_tokens=5),
        "one word that is cut": _sent(TEXT, prompt="a" * MIB, truncate_prompt_tokens=5),
        "a text to tokenise": _sent("/tokenize", prompt=text[: MIB // 2]),
        "ids to detokenise": _repeated("/detokenize", '{"tokens":[', "65"),
        "a text that is echoed": _sent(TEXT, prompt=["hi " * 600] * 8, echo=True, n=1),
        "a body that is no JSON": (CHAT, b"[" + b"1" * MIB),
        "numbers without an end": (CHAT, b'{"messages":[],"seed":' + b"9" * MIB + b"}"),
        "half a character": (CHAT, _sent(messages=[{"content": "@"}])[1].replace(b"@", HALF)),
        "keys without an end": (CHAT, b'{"' + b"k" * MIB + b'":1,"messages":[]}'),
        "a template without an end": _sent(messages=[{"role": "user", "content": LOOP}]),
    }


def test_no_body_holds_the_loop_up(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = _nasty()
    for lane in app.pool.lanes:
        base, more, most = lane.cpu_s
        monkeypatch.setattr(lane, "cpu_s", (min(base, 0.5), more, most if more else 0.5))

    statuses, slow = {}, {}
    for what, body in bodies.items():
        with watched() as longest:
            statuses[what], _ = app.run(app.post(*body))
        if longest.seconds > LIMIT_S:
            slow[what] = longest
    assert slow == {}
    assert {what: s for what, s in statuses.items() if not (s == 200 or 400 <= s < 500)} == {}
    assert app.run(app.post(TEXT, b'{"prompt":"a","max_tokens":1}'))[0] == 200


def test_neither_does_the_largest(app: App) -> None:
    _, body = _repeated(CHAT, '{"messages":[', "{}", size=32 * MIB)
    packed = gzip.compress(b" " * (31 * MIB) + b"{}", 1)
    with watched() as longest:
        first, _ = app.run(app.post(CHAT, body))
        second, _ = app.run(app.post(CHAT, packed, **{"content-encoding": "gzip"}))
    assert (first, second) == (400, 400)
    assert longest.seconds < LIMIT_S, longest


@pytest.mark.parametrize("stage", ["waits", "is read", "compiles"])
def test_a_client_that_leaves_is_noticed(
    app: App, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, loop = _sent(messages=[{"role": "user", "content": LOOP}], x="x" * CHUNK)
    rows = {f"p{i}": {"type": "string", "maxLength": 500 + i} for i in range(2000)}
    schema = {"type": "object", "properties": rows, "required": list(rows)}
    _, formed = _sent(guided_json=schema)
    lanes = {lane.name: lane for lane in app.pool.lanes}
    lane = lanes["grammars" if stage == "compiles" else "long prompts"]
    monkeypatch.setattr(lanes["grammars"], "cpu_s", (60.0, 0.0, 60.0))
    before = len(app.client.submitted)

    def there() -> bool:
        return bool(lane.queue if stage == "waits" else lane.walls)

    async def leave() -> float:
        gone, others = asyncio.Event(), asyncio.Event()
        body = formed if stage == "compiles" else loop
        count = lane.workers if stage == "waits" else 0
        more = [asyncio.ensure_future(app.post(CHAT, body, others)) for _ in range(count)]
        await until(lambda: len(lane.walls) == count)
        asking = asyncio.ensure_future(app.post(CHAT, body, gone))
        await until(there)
        begin = time.monotonic()
        gone.set()
        status, _ = await asking
        took = time.monotonic() - begin
        assert status == 499 and not lane.queue
        others.set()
        await asyncio.gather(*more)
        await until(lambda: not lane.walls)
        return took

    assert app.run(leave()) < 1.0
    assert app.service.open == 0 and len(app.client.submitted) == before
