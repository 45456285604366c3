"""A span for every request, sent to an OpenTelemetry collector.

Knows OpenTelemetry (the extra `otel`) and the field's names of attributes; sends from a thread of
its own and drops what cannot be sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from urllib.parse import urlsplit

from spark_engine.errors import OptionError
from spark_engine.hints import extra
from spark_engine.runtime.server.visits import Visit

PATH = "/v1/traces"  # of a collector, where the URL says none
SEND_S = 5.0  # one export; what is on its way down gets so long too
OPERATIONS = {  # a route's operation, as the conventions for generative AI name it
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
}
Value = str | int | float | tuple[str, ...]


class Traces:
    """Sends the visits that did work. `endpoint` is a collector's http(s) URL; `model` is served.

    Raises OptionError without the extra `otel`, or for a URL that is none.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        given = f"--otlp-traces-endpoint is {endpoint!r}"
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind, Status, StatusCode
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise OptionError(f"{given}, which needs the extra `otel`: {extra('otel')}") from None
        url = urlsplit(endpoint)
        if url.scheme not in ("http", "https") or not url.netloc:
            raise OptionError(f"{given}; give a collector's URL, e.g. http://localhost:4318")
        if url.path in ("", "/"):
            url = url._replace(path=PATH)
        self._model = model
        self._kind, self._failed = SpanKind.SERVER, Status(StatusCode.ERROR)
        self._parent = TraceContextTextMapPropagator().extract
        service = {"service.name": "spark-run", "service.version": version("spark-engine")}
        self._provider = TracerProvider(resource=Resource.create(service), shutdown_on_exit=False)
        exporter = OTLPSpanExporter(url.geturl(), timeout=SEND_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("spark-engine")

    def __call__(self, visit: Visit) -> None:
        """Notes a visit that has ended. Never waits."""
        operation = OPERATIONS.get(visit.handler)
        if operation is None:
            return
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            self._parent(visit.headers),
            self._kind,
            attributes=attributes(visit, operation, self._model),
            start_time=visit.wall,
        )
        if visit.problem or visit.status >= 500:
            span.set_status(self._failed)
        if (work := visit.work) is not None and work.first is not None:
            span.add_event("first token", timestamp=visit.wall + int(work.first * 1e9))
        span.end(visit.wall + int(visit.seconds * 1e9))

    def close(self) -> None:
        """Sends what is left, or gives up after a while."""
        self._provider.force_flush(int(SEND_S * 1000))
        self._provider.shutdown()


def attributes(visit: Visit, operation: str, model: str) -> Mapping[str, Value]:
    """A span's: OpenTelemetry's names, and vLLM's for the latencies; seconds and tokens."""
    row: dict[str, Value | None] = {
        "http.request.method": visit.method,
        "http.route": visit.handler,
        "http.response.status_code": visit.status,
        "error.type": visit.problem or None,
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "spark",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.id": visit.id,
        "gen_ai.latency.e2e": visit.seconds,
        "user.id": visit.key or None,
    }
    if (work := visit.work) is not None:
        params = work.params
        row |= {
            "gen_ai.usage.input_tokens": work.prompt,
            "gen_ai.usage.output_tokens": work.completion,
            "gen_ai.usage.cache_read.input_tokens": work.cached,
            "gen_ai.usage.prompt_tokens": work.prompt,
            "gen_ai.usage.completion_tokens": work.completion,
            "gen_ai.usage.num_sequences": len(work.ends),
            "gen_ai.response.finish_reasons": work.ends,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.n": len(work.ends),
            "gen_ai.latency.time_in_queue": work.queued,
            "gen_ai.latency.time_to_first_token": work.first,
        }
    return {name: value for name, value in row.items() if value is not None}
