"""HTTP requests: the key of each, and its lines in the log and the metrics."""

import asyncio
import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from spark_engine.runtime.engine.request import Event, FinishReason, SamplingParams
from spark_engine.runtime.server.http.app import create_app
from spark_engine.runtime.server.http.endpoints import Endpoints
from spark_engine.runtime.server.http.routes import ROUTES, page_routes
from spark_engine.runtime.server.operation import http_request
from spark_engine.runtime.server.operation.keys import Keyring
from spark_engine.runtime.server.operation.log_limit import OnePerKind
from spark_engine.runtime.server.operation.logs import QUIET, AccessLog, LogFormat, LogLevel, set_up
from spark_engine.runtime.server.operation.request_ids import RequestIds
from tests.runtime.fake_client import FakeClient, service
from tests.runtime.server.api.api_client import ApiClient
from tests.runtime.server.operation.test_metrics import samples

KEYS = """
[[key]]
name = "ann"
key = "a"
requests_per_minute = 3
tokens_per_minute = 1000
max_requests = 1

[[key]]
name = "bob"
key = "b"
"""
SCRIPT = [Event(0, 40), Event(0, 41), Event(0, 42, finish=FinishReason.LENGTH, cached=2)]
FAILS = [Event(0, 40), Event(0, finish=FinishReason.ERROR, message="not finite")]
BODY = {"prompt": [5, 6, 7], "max_tokens": 3, "n": 2}


class Server(ApiClient):
    """An application, its client, and the records of each request."""

    def __init__(self, folder: Path, script: list[Event]) -> None:
        super().__init__()
        (folder / "keys").write_text(KEYS)
        (folder / "keys").chmod(0o600)
        self.requests: list[http_request.HttpRequest] = []
        self.client._script = script
        self.keys = Keyring(folder / "keys", clock=lambda: 0.0)  # nothing is refilled
        self.serve(AccessLog())

    def serve(self, access: AccessLog) -> None:
        """Makes the application, with another access log."""
        listeners = [self.requests.append, access]
        self.app = create_app(Endpoints(self.service), self.keys, listeners)

    def ask(self, path: str = "/v1/completions", key: str = "a", **body: Any) -> httpx.Response:
        head = {"authorization": f"Bearer {key}"} if key else {}
        return self.post(path, body, **head) if body else self.get(path, **head)


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path, SCRIPT)


def test_a_request_knows_how_it_used_the_engine(server: Server) -> None:
    assert server.ask(**BODY).status_code == 200
    (request,) = server.requests
    assert (request.key, request.method, request.handler) == ("ann", "POST", "/v1/completions")
    assert (request.status, request.problem) == (200, "")
    use = request.use
    assert use is not None
    assert (use.prompt, use.cached, use.completion) == (3, 2, 6), "a prompt counts once"
    assert use.ends == ("length", "length") and use.params.max_tokens == 3
    assert use.first is not None and 0 <= use.first <= request.seconds < 5
    found = samples(server.service.metrics)
    assert found["spark:key_tokens_total{key=ann,kind=prompt}"] == 3
    assert found["spark:key_tokens_total{key=ann,kind=completion}"] == 6
    counted = "http_requests_total{handler=/v1/completions,method=POST,status=%d}"
    assert (found[counted % 200], found[counted % 400]) == (1, 0)
    assert found["http_requests_in_flight{}"] == 0


def test_the_answer_says_what_is_left_to_the_key(server: Server) -> None:
    answer = server.ask(**BODY)
    shown = {k: v for k, v in answer.headers.items() if k.startswith("x-ratelimit")}
    assert shown["x-ratelimit-limit-requests"] == "3"
    assert shown["x-ratelimit-remaining-requests"] == "2"
    assert shown["x-ratelimit-limit-tokens"] == "1000"
    assert 900 <= int(shown["x-ratelimit-remaining-tokens"]) < 1000
    assert re.fullmatch(r"\d+s", shown["x-ratelimit-reset-tokens"])
    assert not any(k.startswith("x-ratelimit") for k in server.ask(key="b", **BODY).headers)


def test_looking_at_a_stored_response_is_a_request_and_waits_for_none(server: Server) -> None:
    account = server.keys.find(b"a")
    account.enter()  # all that may run at a time
    assert server.ask(**BODY).status_code == 429
    assert [server.ask("/v1/responses/resp_1").status_code for _ in range(3)] == [404, 404, 429]
    assert server.ask("/v1/responses/resp_1/input_items").status_code == 429
    assert server.ask("/v1/responses/resp_1", key="b").status_code == 404


def test_a_limit_is_an_answer_with_the_time_to_wait(server: Server) -> None:
    statuses = [server.ask(**BODY).status_code for _ in range(3)]
    refused = server.ask(**BODY)
    assert (statuses, refused.status_code) == ([200] * 3, 429)
    assert 15 <= int(refused.headers["retry-after"]) <= 20
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "'ann' has used its 3 requests a minute" in error["message"]
    assert server.requests[-1].key == "ann" and server.requests[-1].problem == "rate_limit_exceeded"
    assert server.ask(key="b", **BODY).status_code == 200
    assert server.ask("/v1/models").status_code == 200, "what costs nothing is not counted"
    found = samples(server.service.metrics)
    assert found["spark:key_limited_total{key=ann,limit=requests}"] == 1
    assert len(server.client.submitted) == 8


def test_tokens_are_charged_as_they_come(server: Server) -> None:
    account = server.keys.accounts["ann"]
    assert account.tokens is not None
    before = account.tokens.level
    server.ask(**BODY)
    assert account.tokens.level == before - 9, "three read, six made"
    account.charge(2000)
    refused = server.ask(**BODY)
    assert refused.status_code == 429 and "1000 tokens a minute" in refused.text


@pytest.mark.parametrize("script", [SCRIPT, FAILS])
def test_a_running_request_ends_however_it_ends(tmp_path: Path, script: list[Event]) -> None:
    server = Server(tmp_path, script)
    for body in (BODY, {**BODY, "stream": True}, {"prompt": 3.5}):
        server.ask(**body)
    assert [account.open for account in server.keys.accounts.values()] == [0, 0]


def test_what_runs_on_behind_the_answer_counts_until_it_ends(server: Server) -> None:
    account, metrics = server.keys.accounts["ann"], server.service.metrics
    running: list[http_request.HttpRequest] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        request = http_request.current()
        assert request is not None
        http_request.admit({"authorization": "Bearer a"}, server.keys, True, metrics)
        request.begin(5)
        running.append(request)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    asyncio.run(http_request.RequestMiddleware(app, metrics, [])(scope, None, None))  # type: ignore[arg-type]
    assert account.open == 1
    use = http_request.EngineUse(5, 0, 7, ("stop",), None, None, SamplingParams())
    running[0].finish(use)
    assert account.open == 0
    assert samples(metrics)["spark:key_tokens_total{key=ann,kind=completion}"] == 7


def test_without_a_key_only_the_open_paths_answer(server: Server) -> None:
    for path in ("/v1/models", "/v1/models/fake"):
        refused = server.ask(path, key="")
        assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"
    assert server.ask(key="", **BODY).status_code == 401
    assert [server.ask(p, key="").status_code for p in ("/health", "/metrics", "/version")] == (
        [200] * 3
    )
    assert server.client.submitted == []
    assert server.requests[0].problem == "invalid_api_key" and server.requests[0].account is None


def test_metrics_name_keys_only_to_holders_of_a_key(server: Server) -> None:
    server.service.metrics.add_key("ann", ["requests"])
    shown = server.ask("/metrics", key="").text
    assert "ann" not in shown and "spark:key" not in shown and "spark:prompt_tokens" in shown
    server.app = create_app(Endpoints(server.service, metrics_by_key=True), server.keys)
    for path in ("/metrics", "/page/live"):
        assert server.ask(path, key="").status_code == 401
    assert server.ask("/page/live").status_code == 200
    assert server.ask("/health", key="").status_code == 200
    shown = server.ask("/metrics").text
    assert 'spark:key_limited_total{key="ann",limit="requests"} 0.0' in shown
    assert "spark:prompt_tokens" in shown


def test_anthropics_header_brings_a_key_too(server: Server) -> None:
    rows = ({"x-api-key": "b"}, {"x-api-key": "c"}, {"x-api-key": "b", "authorization": "Bearer c"})
    assert [server.get("/v1/models", **row).status_code for row in rows] == [200, 401, 401]


def test_a_stream_that_fails_in_its_midst_says_so(tmp_path: Path) -> None:
    server = Server(tmp_path, FAILS)
    answer = server.ask(**BODY | {"n": 1, "stream": True, "return_token_ids": True})
    assert answer.status_code == 200 and "not finite" in answer.text
    (request,) = server.requests
    assert request.problem == "engine_error" and request.use is not None
    assert (request.use.completion, request.use.ends) == (1, ("error",))


def test_paths_that_are_not_there_make_one_series(server: Server) -> None:
    for name in ("/a", "/b", "/v1/models/x"):
        assert server.ask(name, key="b").status_code == 404
    found = samples(server.service.metrics)
    assert found["http_requests_total{handler=none,method=GET,status=404}"] == 2
    name = "http_requests_total{handler=/v1/models/{name:path},method=GET,status=404}"
    assert found[name] == 1
    assert not any("/a" in key or "/b" in key for key in found)


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What a server writes, the limit on lines included."""
    root, stream = logging.getLogger(), io.StringIO()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    kept, level = list(root.handlers), root.level
    yield stream
    for handler in list(root.handlers):
        root.removeHandler(handler)
    for handler in kept:
        root.addHandler(handler)
    root.setLevel(level)


def test_the_access_log_as_json(server: Server, lines: io.StringIO) -> None:
    set_up(LogFormat.JSON, LogLevel.WARNING, lines)
    for handler in logging.getLogger().handlers:
        handler.addFilter(OnePerKind())
    server.ask(**BODY)
    for _ in range(5):
        server.ask("/nothing?secret=1", key="b")
    rows = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert len(rows) == 6, "a line for each, also where others are limited"
    first, last = rows[0], rows[-1]
    assert first["message"] == "access" and first["level"] == "info"
    wanted = {"key": "ann", "method": "POST", "path": "/v1/completions", "status": 200}
    wanted |= {"prompt": 3, "cached": 2, "tokens": 6, "ends": "length,length"}
    assert {name: first[name] for name in wanted} == wanted
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00", first["time"])
    assert {"seconds", "first", "id"} <= first.keys() and "problem" not in first
    assert last["status"] == 404 and "secret" not in lines.getvalue()
    assert "key=a\n" not in lines.getvalue() and '"a"' not in lines.getvalue()


def test_the_access_log_for_people(server: Server, lines: io.StringIO) -> None:
    set_up(LogFormat.TEXT, LogLevel.INFO, lines)
    server.ask(**BODY)
    (line,) = lines.getvalue().splitlines()
    assert line.startswith("spark-run: access id=")
    words = dict(word.split("=", 1) for word in line.split()[2:])
    assert (words["key"], words["status"], words["tokens"]) == ("ann", "200", "6")
    assert words["path"] == "/v1/completions" and 0 <= float(words["seconds"]) < 5


def test_probes_scrapes_and_the_page_have_no_line_unless_they_fail_or_are_asked_for(
    server: Server, lines: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_up(LogFormat.JSON, LogLevel.INFO, lines)

    def paths() -> list[str]:
        found = [json.loads(line)["path"] for line in lines.getvalue().splitlines()]
        lines.seek(0)
        lines.truncate()
        return found

    quiet = ["/health", "/ping", "/ready", "/load", "/metrics", "/page/live", "/page/main.js", "/"]
    for path in quiet:
        assert server.ask(path, key="").status_code == 200
    monkeypatch.setattr(server.service.client, "unhealthy_reason", lambda: "it fell")
    assert server.ask("/health", key="").status_code == 503
    assert paths() == []
    for path in ("/page/none.js", "/v1/models", "/version"):
        server.ask(path, key="")
    assert paths() == ["/page/none.js", "/v1/models", "/version"]
    server.serve(AccessLog(all_=True))
    for path in quiet:
        server.ask(path, key="")
    assert paths() == quiet
    assert {route.path for route in (*ROUTES, *page_routes())} >= QUIET


def test_no_name_breaks_a_line(lines: io.StringIO) -> None:
    set_up(LogFormat.TEXT, LogLevel.INFO, lines)
    request = http_request.HttpRequest("an id", "GET", "/a b\n\x1b[31mé='", "", {})
    AccessLog()(request)
    (line,) = lines.getvalue().splitlines()
    assert "\x1b" not in line and "id='an id'" in line and line.isascii()


def test_other_lines_name_the_request_they_are_about(lines: io.StringIO) -> None:
    async def noisy(scope: Any, receive: Any, send: Any) -> None:
        logging.getLogger("x").warning("within %s", "it")

    layers = RequestIds(
        http_request.RequestMiddleware(noisy, service(FakeClient(), None).metrics, [])
    )
    scope = {"type": "http", "method": "GET", "path": "/", "headers": [(b"x-request-id", b"r7")]}
    for form in LogFormat:
        set_up(form, LogLevel.INFO, lines)
        asyncio.run(layers(scope, None, None))  # type: ignore[arg-type]
    logging.getLogger("x").warning("outside")
    text, *rows = lines.getvalue().splitlines()
    assert text == "spark-run: within it [request r7]"
    assert json.loads(rows[0])["id"] == "r7" and "id" not in json.loads(rows[1])


def test_an_exception_stays_on_one_line_of_json(lines: io.StringIO) -> None:
    set_up(LogFormat.JSON, LogLevel.ERROR, lines)
    try:
        raise ValueError("né")
    except ValueError:
        logging.getLogger("x").exception("it went wrong")
    logging.getLogger("x").warning("not written")
    (row,) = (json.loads(line) for line in lines.getvalue().splitlines())
    assert row["message"] == "it went wrong" and "ValueError: né" in row["exception"]
