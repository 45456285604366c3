"""A proxy between a coding agent and the server, which records both and forces what is called.

The embedded model cannot decide to call a tool, so the proxy decides: the first turn calls the
shell, the second reads an image, the third answers. It changes a body in these places only: the
parameters of the two forced tools are fixed (in each request alike, so the prompt's prefix stays
the same), `tool_choice` names the tool of this turn, the answer's form is the constant `ANSWER`,
budgets of thought are cut to `THOUGHT`, and requests outside the turns (titles) get `ASIDE` tokens.
"""

import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Json = dict[str, Any]
ANSWER = "Done."
THOUGHT = 16  # tokens, also the server's --think-budget
ASIDE = 32  # tokens
SHELL, IMAGE, REPLY = STEPS = ("shell", "image", "answer")
_OWN_HEADERS = {"host", "content-length", "transfer-encoding", "connection", "accept-encoding"}
_SCHEMA = {"name": "answer", "strict": True, "schema": {"type": "string", "const": ANSWER}}


@dataclass(frozen=True)
class Call:
    """A tool, and the arguments that it is called with."""

    tool: str
    arguments: Mapping[str, Any]

    def schema(self) -> Json:
        kinds = {str: "string", bool: "boolean", int: "integer", list: "array"}
        rows = {k: {"type": kinds[type(v)], "const": v} for k, v in self.arguments.items()}
        return {
            "type": "object",
            "properties": rows,
            "required": list(rows),
            "additionalProperties": False,
        }


@dataclass
class Exchange:
    """A request as the agent sent it, and what it got.

    `step` is a turn of STEPS, or ""; `status` is 0 where the agent hung up before an answer.
    """

    method: str
    path: str
    asked: Json | None
    step: str = ""
    status: int = 0
    answer: str = ""
    seconds: float = 0.0

    def events(self) -> Iterator[Json]:
        """The objects of the answer, of a stream or alone."""
        lines = self.answer.splitlines()
        rows = [line[5:].strip() for line in lines if line.startswith("data:")] or [self.answer]
        for row in rows:
            with contextlib.suppress(json.JSONDecodeError):
                if isinstance(found := json.loads(row), dict):
                    yield found

    def usage(self) -> tuple[int, int]:
        """Tokens of the prompt, and those of them from the prefix cache."""
        prompt = cached = 0
        for event in self.events():
            inner = event.get("response") or event.get("message") or event
            if not isinstance(usage := inner.get("usage"), dict):
                continue
            details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
            hits = usage.get("cache_read_input_tokens") or 0
            total = usage.get("prompt_tokens") or (usage.get("input_tokens") or 0) + hits
            prompt = max(prompt, total)
            cached = max(cached, hits, details.get("cached_tokens") or 0)
        return prompt, cached


@dataclass(frozen=True)
class Api:
    """Where the bodies of one API have what the proxy reads and forces."""

    path: str
    limits: tuple[str, ...]  # the names of limits on tokens
    parameters: str  # the name of a tool's parameters
    results: Callable[[Json], list[Any]]  # what tools gave, from a body
    choice: Callable[[str], Json]  # the `tool_choice` that has this tool called, once
    shape: Callable[[Json], Json]  # the fields that give a body's answer the form `_SCHEMA`

    def tools(self, body: Json) -> dict[str, Json]:
        """By a tool's name, what has its parameters."""
        rows = [tool.get("function", tool) for tool in body.get("tools") or []]
        return {row.get("name", ""): row for row in rows}


def _chat_results(body: Json) -> list[Any]:
    return [m.get("content") for m in body.get("messages", []) if m.get("role") == "tool"]


def _message_results(body: Json) -> list[Any]:
    contents = [m.get("content") for m in body.get("messages", [])]
    blocks = [b for content in contents if isinstance(content, list) for b in content]
    return [b.get("content") for b in blocks if b.get("type") == "tool_result"]


def _response_results(body: Json) -> list[Any]:
    rows = items if isinstance(items := body.get("input"), list) else []
    return [r.get("output") for r in rows if str(r.get("type")).endswith("_call_output")]


def _is_shaped(body: Json) -> bool:
    """Whether the agent asks for a form itself."""
    inner = (body.get(name) or {} for name in ("output_config", "text"))
    return "response_format" in body or any("format" in one for one in inner)


_FORM = {"type": "json_schema", "schema": _SCHEMA["schema"]}
_ROWS = (
    Api(
        "/v1/chat/completions",
        ("max_tokens", "max_completion_tokens"),
        "parameters",
        _chat_results,
        lambda tool: {"type": "function", "function": {"name": tool}},
        lambda body: {"response_format": {"type": "json_schema", "json_schema": _SCHEMA}},
    ),
    Api(
        "/v1/messages",
        ("max_tokens",),
        "input_schema",
        _message_results,
        lambda tool: {"type": "tool", "name": tool, "disable_parallel_tool_use": True},
        lambda body: {"output_config": {**body.get("output_config", {}), "format": _FORM}},
    ),
    Api(
        "/v1/responses",
        ("max_output_tokens",),
        "parameters",
        _response_results,
        lambda tool: {"type": "function", "name": tool},
        lambda body: {"text": {**(body.get("text") or {}), "format": {**_FORM, **_SCHEMA}}},
    ),
)
APIS = {api.path: api for api in _ROWS}


def step_of(api: Api, body: Json, calls: Mapping[str, Call]) -> str:
    """Which turn a body is: by the results that it has; "" where the tools are not offered."""
    offered = api.tools(body)
    if not all(call.tool in offered for call in calls.values()):
        return ""
    return STEPS[min(len(api.results(body)), 2)]


def forced(api: Api, body: Json, calls: Mapping[str, Call]) -> Json:
    body = json.loads(json.dumps(body))
    step = step_of(api, body, calls)
    for call in calls.values():
        if row := api.tools(body).get(call.tool):
            row[api.parameters] = call.schema()
    if step in calls:
        body["tool_choice"] = api.choice(calls[step].tool)
    elif not _is_shaped(body):
        body |= api.shape(body)
    if not step:
        body |= {name: min(body[name], ASIDE) for name in api.limits if body.get(name)}
    thinking = body.get("thinking")
    if isinstance(thinking, dict) and thinking.get("budget_tokens"):
        thinking["budget_tokens"] = THOUGHT
    return body


@dataclass
class Proxy:
    """Forwards to `server`; `calls` are forced, by the step; `seen` is what was exchanged."""

    server: str
    calls: Mapping[str, Call]
    seen: list[Exchange] = field(default_factory=list)

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """Serves on a free port, and gives its address."""
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                with contextlib.suppress(OSError):
                    super().handle_one_request()

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing: `seen` has it."""

            do_GET = do_POST = do_HEAD = do_PUT = do_DELETE = lambda self: proxy.forward(self)

        http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        http.daemon_threads = True
        threading.Thread(target=http.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{http.server_port}"
        finally:
            http.shutdown()
            http.server_close()

    def forward(self, client: BaseHTTPRequestHandler) -> None:
        """One request and its answer, piece by piece as it comes."""
        data = client.rfile.read(int(client.headers.get("content-length") or 0))
        api = APIS.get(client.path.partition("?")[0])
        exchange = Exchange(client.command, client.path, json.loads(data) if data else None)
        self.seen.append(exchange)
        if api is not None and exchange.asked is not None:
            exchange.step = step_of(api, exchange.asked, self.calls)
            data = json.dumps(forced(api, exchange.asked, self.calls)).encode()
        heads = {k: v for k, v in client.headers.items() if k.lower() not in _OWN_HEADERS}
        begin = time.monotonic()
        server = HTTPConnection(self.server.removeprefix("http://"))
        ended = threading.Event()
        try:
            server.request(client.command, client.path, data or None, heads)
            watch = threading.Thread(
                target=_hang_up, args=(client.connection, server.sock, ended), daemon=True
            )
            watch.start()
            _answer(client, server.getresponse(), exchange)
        finally:
            ended.set()
            exchange.seconds = time.monotonic() - begin
            server.close()


def _hang_up(client: socket.socket, server: socket.socket, ended: threading.Event) -> None:
    """Ends a request whose client has gone, as it would without a proxy."""
    while not ended.wait(0.2):
        try:
            readable, _, _ = select.select([client], [], [], 0)
            gone = readable and not client.recv(1, socket.MSG_PEEK)
        except OSError:
            gone = True
        if gone:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            return


def _answer(client: BaseHTTPRequestHandler, got: HTTPResponse, exchange: Exchange) -> None:
    client.send_response(got.status)
    for key, value in got.getheaders():
        if key.lower() not in _OWN_HEADERS:
            client.send_header(key, value)
    client.send_header("Transfer-Encoding", "chunked")
    client.end_headers()
    text = bytearray()
    exchange.status = got.status
    try:
        while piece := got.read1(65536):
            text += piece
            client.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        if client.command != "HEAD":
            client.wfile.write(b"0\r\n\r\n")
    finally:
        exchange.answer = text.decode(errors="replace")
