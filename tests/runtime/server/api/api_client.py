"""A client of the APIs over HTTP without sockets, and an engine that answers with a given text."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import httpx

from spark_engine.runtime.engine.request import Event, FinishReason
from spark_engine.runtime.server.http.app import create_app
from spark_engine.runtime.server.http.endpoints import Endpoints
from spark_engine.runtime.text.chat import ChatTemplate
from spark_engine.runtime.text.tokenizer import Tokenizer
from tests.runtime import small_tokenizer
from tests.runtime.fake_client import FakeClient, Served, service

THOUGHT = "I think.\n</think>\n\n"
CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
    "</function>\n</tool_call>"
)
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
USER = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
T = TypeVar("T")


@cache
def tokenizer() -> Tokenizer:
    with TemporaryDirectory() as folder:
        return Tokenizer.load(small_tokenizer.write(Path(folder)))


@cache
def _template() -> ChatTemplate:
    return ChatTemplate(small_tokenizer.TEMPLATE)


def script(text: str, finish: FinishReason = FinishReason.STOP) -> list[Event]:
    """The events of an answer; one that stops ends with an end id."""
    ids = tokenizer().encode(text)
    if finish is FinishReason.STOP:
        ids.append(1)
    events = [Event(0, i, -0.5, ((i, -0.5), (i + 1, -1.5))) for i in ids]
    return [*events[:-1], events[-1]._replace(finish=finish)] if events else []


def failing_script() -> list[Event]:
    """A token, and then logits that are not finite."""
    return [Event(0, 70, -0.5), Event(0, finish=FinishReason.ERROR, message="nan")]


class ApiClient:
    """One server. `client` remembers what the engine was asked for."""

    def __init__(self, answer: str = "", finish: FinishReason = FinishReason.STOP, **options: Any):
        self.client = FakeClient(script(answer, finish))
        self.service: Served = service(
            self.client,
            tokenizer(),
            template=options.pop("template", None) or _template(),
            context=options.pop("context", 2048),
            **options.pop("service", {}),
        )
        self.app = create_app(Endpoints(self.service), **options)

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://x")

    def run(self, work: Callable[[httpx.AsyncClient], Awaitable[T]]) -> T:
        async def inside() -> T:
            async with self.http() as http:
                return await work(http)

        return asyncio.run(inside())

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.run(lambda http: http.post(path, content=data, headers=headers))

    def get(self, path: str, method: str = "GET", **headers: str) -> httpx.Response:
        return self.run(lambda http: http.request(method, path, headers=headers))

    @property
    def prompt(self) -> str:
        return tokenizer().decode(self.client.submitted[-1].prompt, skip_special=False)


def events(response: httpx.Response) -> Iterator[tuple[str, Any]]:
    """(name, data) of each event of a stream; without a name `message`."""
    for block in response.text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        if "data" in lines:
            data = lines["data"]
            yield lines.get("event", "message"), data if data == "[DONE]" else json.loads(data)


def tool_result(path: str, content: Any, name: str = "f") -> list[Any]:
    """A question, a call and its result, as an API has them."""
    ask = {"role": "user", "content": "look"}
    if path == CHAT:
        call = {"id": "c", "type": "function", "function": {"name": name, "arguments": "{}"}}
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        return [ask, said, {"role": "tool", "tool_call_id": "c", "content": content}]
    if path == MESSAGES:
        use = {"type": "tool_use", "id": "c", "name": name, "input": {}}
        block = {"type": "tool_result", "tool_use_id": "c", "content": content}
        said = {"role": "assistant", "content": [use]}
        return [ask, said, {"role": "user", "content": [block]}]
    call = {"type": "function_call", "call_id": "c", "name": name, "arguments": "{}"}
    return [ask, call, {"type": "function_call_output", "call_id": "c", "output": content}]
