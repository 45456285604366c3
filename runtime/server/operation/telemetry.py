"""A span for every request, sent to an OpenTelemetry collector.

Knows OpenTelemetry (the extra `otel`) and its names of attributes; sends from a thread and drops
what cannot be sent.
"""

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from urllib.parse import urlsplit

from spark_engine.errors import OptionError
from spark_engine.hints import extra
from spark_engine.runtime.server.operation.http_request import HttpRequest

NEEDED = ("opentelemetry.sdk.resources", "opentelemetry.exporter.otlp.proto.http.trace_exporter")
PATH = "/v1/traces"  # of a collector, where the URL has no path
SEND_S = 5.0  # one export; also the limit at shutdown
OPERATIONS = {  # a route's operation, as the conventions for generative AI name it
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
}
Value = str | int | float | tuple[str, ...]


def check_endpoint(endpoint: str) -> str:
    """The URL that spans are sent to. Raises OptionError for an invalid URL or without it."""
    given = f"--otlp-traces-endpoint is {endpoint!r}"
    try:
        for name in NEEDED:
            import_module(name)
    except ImportError:
        raise OptionError(f"{given}, which needs the extra `otel`: {extra('otel')}") from None
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.netloc:
        raise OptionError(f"{given}; give a collector's URL, e.g. http://localhost:4318")
    return (url._replace(path=PATH) if url.path in ("", "/") else url).geturl()


class Traces:
    """Sends a span for each request that used the engine. `endpoint`: a collector's http(s) URL.

    Raises OptionError without the extra `otel`, or for an invalid URL.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        url = check_endpoint(endpoint)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._model = model
        self._kind, self._failed = SpanKind.SERVER, Status(StatusCode.ERROR)
        self._parent = TraceContextTextMapPropagator().extract
        service = {"service.name": "spark-run", "service.version": version("spark-engine")}
        self._provider = TracerProvider(resource=Resource.create(service), shutdown_on_exit=False)
        exporter = OTLPSpanExporter(url, timeout=SEND_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("spark-engine")

    def __call__(self, request: HttpRequest) -> None:
        """Records a request that has ended. Never waits."""
        operation = OPERATIONS.get(request.handler)
        if operation is None:
            return
        span = self._tracer.start_span(
            f"{operation} {request.model or self._model}",
            self._parent(request.headers),
            self._kind,
            attributes=attributes(request, operation, request.model or self._model),
            start_time=request.wall,
        )
        if request.problem or request.status >= 500:
            span.set_status(self._failed)
        if (use := request.use) is not None and use.first is not None:
            span.add_event("first token", timestamp=request.wall + int(use.first * 1e9))
        span.end(request.wall + int(request.seconds * 1e9))

    def close(self) -> None:
        """Sends what is left, or gives up after a while."""
        self._provider.force_flush(int(SEND_S * 1000))
        self._provider.shutdown()


def attributes(request: HttpRequest, operation: str, model: str) -> Mapping[str, Value]:
    """A span's: OpenTelemetry's names, and vLLM's for the latencies; seconds and tokens."""
    row: dict[str, Value | None] = {
        "http.request.method": request.method,
        "http.route": request.handler,
        "http.response.status_code": request.status,
        "error.type": request.problem or None,
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "spark",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.id": request.id,
        "gen_ai.latency.e2e": request.seconds,
        "user.id": request.key or None,
    }
    if (use := request.use) is not None:
        params = use.params
        row |= {
            "gen_ai.usage.input_tokens": use.prompt,
            "gen_ai.usage.output_tokens": use.completion,
            "gen_ai.usage.cache_read.input_tokens": use.cached,
            "gen_ai.usage.prompt_tokens": use.prompt,
            "gen_ai.usage.completion_tokens": use.completion,
            "gen_ai.usage.num_sequences": len(use.ends),
            "gen_ai.response.finish_reasons": use.ends,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.n": len(use.ends),
            "gen_ai.latency.time_in_queue": use.queued,
            "gen_ai.latency.time_to_first_token": use.first,
        }
    return {name: value for name, value in row.items() if value is not None}
