"""/metrics: our `spark:` names, and vLLM's for dashboards that use them.

Counts in the HTTP process, once for both names; the engine's counters are in `engine_metrics.py`. A
number has both names; a histogram, which is a series for each bucket, has only vLLM's. Counters of
alerts and dashboards exist from the start, at 0, so that a first event is an increase.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from typing import Any, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from spark_engine.runtime.server.operation.engine_metrics import PREFIXES, EngineCollector, Engines

FIRST = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120)  # seconds
BETWEEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
WHOLE = (0.1, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600, 1800)
PHASE = (0.001, 0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 60, 300, 1800)
LENGTH = (10, 100, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)  # tokens
CHOICES = (1, 2, 5, 10, 100)
HTTP = (1, 10, 100)
# Reasons for which a choice ends; dashboards call a cancelled one `abort`.
REASONS = ("stop", "length", "abort", "error")
# Usual statuses of a route with a body, which exist from the start.
STATUSES = (200, 400, 429, 499, 500, 503, 504)
# Further names of a family under vLLM's prefix.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "inter_token_latency_seconds": ("vllm:time_per_output_token_seconds",)  # until vLLM 0.11
}
OWN = frozenset(("admission_rejections",))  # vLLM has no such counter
F = TypeVar("F", Counter, Histogram)


class Metrics:
    """The counters of one model of a server, and of the server. `engine`: of the model's engine."""

    def __init__(self, engine: EngineCollector) -> None:
        # the series' times of creation are unused, and a fifth of the text
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry, self._of_keys = CollectorRegistry(), CollectorRegistry()
        self._twice = CollectorRegistry()
        self._families: dict[str, Counter | Histogram] = {}
        self._engines = Engines()
        self.registry.register(self._engines)
        self.registry.register(_Twice(self._twice))
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._add_http()
        self._bind(engine)

    def of_model(self, engine: EngineCollector) -> Metrics:
        """The counters of another model of the same server, in the same text."""
        made = copy(self)
        made._bind(engine)
        return made

    def _bind(self, engine: EngineCollector) -> None:
        """The series of this model."""
        self._model = engine.model
        self._engines.rows.append(engine)
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of accepted requests")
        self._generated = self._counter("generation_tokens", "Tokens generated")
        self._refused = self._counter("admission_rejections", "Requests refused: queue full")
        ended = self._family(Counter, "request_success", "Choices ended", "finished_reason")
        self._ended = {reason: ended.labels(self._model, reason) for reason in REASONS}
        self._first = self._times("time_to_first_token_seconds", FIRST)
        self._between = self._times("inter_token_latency_seconds", BETWEEN)
        self._whole = self._times("e2e_request_latency_seconds", WHOLE)
        self._queue = self._times("request_queue_time_seconds", PHASE)
        self._prefill = self._times("request_prefill_time_seconds", PHASE)
        self._decode = self._times("request_decode_time_seconds", PHASE)
        self._inference = self._times("request_inference_time_seconds", PHASE)
        self._each = self._times("request_time_per_output_token_seconds", BETWEEN)
        self._prompts = self._times("request_prompt_tokens", LENGTH)
        self._answers = self._times("request_generation_tokens", LENGTH)
        self._longest = self._times("request_max_num_generation_tokens", LENGTH)
        self._asked = self._times("request_params_max_tokens", LENGTH)
        self._choices = self._times("request_params_n", CHOICES)

    def accepted(self, prompt_tokens: int) -> None:
        """A request was sent to the engine."""
        self._prompt.inc(prompt_tokens)

    def refused(self) -> None:
        """A request was refused by a full queue."""
        self._refused.inc()

    def tokens(self, count: int, seconds: float, first: bool) -> None:
        """A round of tokens arrived, `seconds` after the request (the first) or the last round."""
        self._generated.inc(count)
        (self._first if first else self._between).observe(seconds)

    def ended(self, watch: Stopwatch) -> None:
        self._ended[watch.reason].inc()
        self._whole.observe(watch.whole)
        self._prompts.observe(watch.prompt)
        self._answers.observe(watch.count)
        if watch.queued is not None:
            self._queue.observe(watch.queued)
        if watch.first is None or watch.started is None:
            return
        self._prefill.observe(watch.first - watch.started)
        self._decode.observe(watch.last - watch.first)
        self._inference.observe(watch.last - watch.started)
        if watch.count > 1:
            self._each.observe((watch.last - watch.first) / (watch.count - 1))

    def answered(self, longest: int, choices: int, max_tokens: int | None) -> None:
        """All choices of a prompt ended; tokens of the longest."""
        self._longest.observe(longest)
        self._choices.observe(choices)
        if max_tokens is not None:
            self._asked.observe(max_tokens)

    def add_routes(self, routes: Iterable[tuple[str, str]]) -> None:
        """Shows (method, path) of every route at 0."""
        for method, path in routes:
            if method == "POST":
                self._http_times.labels(path)
            for status in STATUSES if method == "POST" else (200,):
                self._http.labels(method, path, str(status))

    def http(self, method: str, path: str, status: int, seconds: float) -> None:
        """An HTTP request was answered. `path`: its route's, so that clients create no series."""
        self._http.labels(method, path, str(status)).inc()
        if method == "POST":  # the others answer at once
            self._http_times.labels(path).observe(seconds)

    def turned_away(self, status: int) -> None:
        """A connection was closed before its request was complete."""
        self._http.labels("none", "none", str(status)).inc()

    def limited(self, key: str, kind: str) -> None:
        self._limited.labels(key, kind).inc()

    def add_key(self, key: str, kinds: Iterable[str]) -> None:
        for kind in kinds:
            self._limited.labels(key, kind)
        for kind in ("prompt", "completion"):
            self._key_tokens.labels(key, kind)

    def charged(self, key: str, prompt: int, completion: int) -> None:
        self._key_tokens.labels(key, "prompt").inc(prompt)
        self._key_tokens.labels(key, "completion").inc(completion)

    def render(self, by_key: bool = False) -> bytes:
        """Prometheus' text format. `by_key`: with the series that name keys."""
        series = generate_latest(self.registry)
        return series + generate_latest(self._of_keys) if by_key else series

    def counted(self) -> Mapping[str, Mapping[str, float]]:
        """Values of each family of the HTTP process, by its name without a prefix: a counter's
        values by its last label, a histogram's buckets (cumulative) by their bounds."""
        found: dict[str, dict[str, float]] = {}
        for family in self._twice.collect():
            rows = found.setdefault(family.name, {})
            for sample in family.samples:
                mine = sample.labels.get("model_name") == self._model
                if mine and sample.name in (family.name + "_total", family.name + "_bucket"):
                    rows[list(sample.labels.values())[-1]] = sample.value
        return found

    def _add_http(self) -> None:
        own, labels = self.registry, ["method", "handler"]
        text = "HTTP requests by route and status"
        self._http = Counter("http_requests", text, [*labels, "status"], registry=own)
        for status in (408, 503):
            self._http.labels("none", "none", str(status))
        name = "http_request_duration_seconds"
        text = "Seconds from a POST's head to its answer's end"
        self._http_times = Histogram(name, text, ["handler"], buckets=HTTP, registry=own)
        self.in_flight = Gauge("http_requests_in_flight", "HTTP requests now", registry=own)
        text, labels = "Requests refused by a key's limit", ["key", "limit"]
        self._limited = Counter("spark:key_limited", text, labels, registry=self._of_keys)
        text, labels = "Tokens by key", ["key", "kind"]
        self._key_tokens = Counter("spark:key_tokens", text, labels, registry=self._of_keys)

    def _family(self, kind: type[F], name: str, text: str, *labels: str, **given: Any) -> F:
        """The family of this name, made for the first model."""
        if name not in self._families:
            own = ("model_name", *labels)
            self._families[name] = kind(name, text, own, registry=self._twice, **given)
        found = self._families[name]
        assert isinstance(found, kind)
        return found

    def _counter(self, name: str, text: str) -> Counter:
        return self._family(Counter, name, text).labels(self._model)

    def _times(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        text = name.replace("_", " ")
        return self._family(Histogram, name, text, buckets=buckets).labels(self._model)


class Stopwatch:
    """The times of one choice, reported to `metrics`; in seconds of `time.monotonic`.

    Attributes:
        prompt, count: tokens of the prompt, and generated so far.
        started: when the engine started it; None before, or where that is not known.
        first, last: when its first and latest tokens arrived.
    """

    def __init__(self, metrics: Metrics, prompt: int = 0) -> None:
        self._metrics = metrics
        self.prompt, self.count = prompt, 0
        self.start = self.last = time.monotonic()
        self.started: float | None = None
        self.first: float | None = None
        self.whole = 0.0  # seconds, once it has ended
        self.reason = ""  # why it ended

    @property
    def queued(self) -> float | None:
        """Seconds until the engine started it."""
        return None if self.started is None else max(0.0, self.started - self.start)

    def tokens(self, count: int) -> None:
        now = time.monotonic()
        self._metrics.tokens(count, now - self.last, self.first is None)
        self.first = now if self.first is None else self.first
        self.last, self.count = now, self.count + count

    def end(self, reason: str) -> None:
        """The choice ended. Dashboards call a cancelled one `abort`."""
        self.whole = time.monotonic() - self.start
        self.reason = "abort" if reason == "cancelled" else reason
        self._metrics.ended(self)


class _Twice(Collector):
    """A value that is counted once and shown under all its names."""

    def __init__(self, counted: CollectorRegistry) -> None:
        self._counted = counted

    def collect(self) -> Iterator[Metric]:
        for family in self._counted.collect():
            prefixes = PREFIXES[:1] if family.name in OWN else PREFIXES
            if family.type == "histogram":
                prefixes = PREFIXES[1:]
            names = [prefix + family.name for prefix in prefixes]
            for name in (*names, *ALIASES.get(family.name, ())):
                twin = Metric(name, family.documentation, family.type)
                old = len(family.name)
                twin.samples = [s._replace(name=name + s.name[old:]) for s in family.samples]
                yield twin
