"""Spans of requests, as a collector gets them."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from spark_engine.errors import OptionError
from spark_engine.runtime.engine.request import SamplingParams
from spark_engine.runtime.server.operation import telemetry as module
from spark_engine.runtime.server.operation.http_request import EngineUse, HttpRequest
from spark_engine.runtime.server.operation.telemetry import Traces

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector:
    def __init__(self) -> None:
        self.paths: list[str] = []
        self.spans: list[Any] = []
        self.resource: dict[str, Any] = {}

    def take(self, path: str, data: bytes) -> None:
        self.paths.append(path)
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            self.resource = _values(resource.resource.attributes)
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]


def _values(rows: Any) -> dict[str, Any]:
    def value(one: Any) -> Any:
        kind = one.WhichOneof("value")
        if kind == "array_value":
            return [value(each) for each in one.array_value.values]
        return getattr(one, kind)

    return {row.key: value(row.value) for row in rows}


@contextmanager
def _collector() -> Iterator[tuple[str, Collector]]:
    found = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.take(self.path, self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", found
    finally:
        server.shutdown()
        server.server_close()


def _request(handler: str = "/v1/chat/completions", **more: Any) -> HttpRequest:
    request = HttpRequest("r1", "POST", handler, "", more.pop("headers", {}), handler=handler)
    request.status, request.seconds = 200, 2.5
    params = SamplingParams(temperature=0.5, top_p=0.9, max_tokens=40)
    request.use = EngineUse(30, 20, 12, ("stop", "length"), 0.25, 0.75, params)
    for name, value in more.items():
        setattr(request, name, value)
    return request


def test_a_request_is_a_span_with_the_fields_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEND_S", 60.0)
    with _collector() as (url, found):
        traces = Traces(url, "m")
        request = _request(headers={"traceparent": PARENT})
        traces(request)
        traces(_request("/v1/completions", use=None, status=503, problem="queue_full"))
        traces(_request("/health"))
        traces.close()
    assert set(found.paths) == {"/v1/traces"} and found.resource["service.name"] == "spark-run"
    chat, text = sorted(found.spans, key=lambda span: str(span.name))
    assert (chat.name, text.name) == ("chat m", "text_completion m")
    assert chat.trace_id.hex() == PARENT.split("-")[1], "the client's trace continues"
    assert chat.parent_span_id.hex() == PARENT.split("-")[2]
    assert chat.start_time_unix_nano == request.wall
    assert chat.end_time_unix_nano - chat.start_time_unix_nano == 2_500_000_000
    (event,) = chat.events
    assert (event.name, event.time_unix_nano - request.wall) == ("first token", 750_000_000)
    wanted = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.request.id": "r1",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.max_tokens": 40,
        "gen_ai.request.n": 2,
        "gen_ai.usage.input_tokens": 30,
        "gen_ai.usage.prompt_tokens": 30,
        "gen_ai.usage.output_tokens": 12,
        "gen_ai.usage.completion_tokens": 12,
        "gen_ai.usage.cache_read.input_tokens": 20,
        "gen_ai.response.finish_reasons": ["stop", "length"],
        "gen_ai.latency.e2e": 2.5,
        "gen_ai.latency.time_in_queue": 0.25,
        "gen_ai.latency.time_to_first_token": 0.75,
        "http.response.status_code": 200,
        "http.route": "/v1/chat/completions",
    }
    shown = _values(chat.attributes)
    assert {name: shown[name] for name in wanted} == wanted
    failed = _values(text.attributes)
    assert failed["error.type"] == "queue_full" and "gen_ai.usage.input_tokens" not in failed
    assert (chat.status.code, text.status.code) == (0, 2)


def test_a_missing_collector_delays_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEND_S", 0.5)
    with _collector() as (url, _):
        pass
    traces, start = Traces(url, "m"), time.monotonic()
    for _ in range(100):
        traces(_request())
    assert time.monotonic() - start < 10, "each that waited would take a second for its tries"
    traces.close()
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("url", ["localhost:4318", "grpc://x:4317", "", "http://"])
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(OptionError, match="--otlp-traces-endpoint is .*http://localhost:4318"):
        Traces(url, "m")


def test_without_the_extra_it_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(OptionError, match="install .*opentelemetry-sdk"):
        Traces("http://localhost:4318", "m")
