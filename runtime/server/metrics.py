"""What /metrics shows: our own `spark:` names, and vLLM's for the boards that are keyed on them.

Knows names and labels. Counts what the HTTP process sees; the engine's own counters are read from
its latest report at each scrape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from spark_engine.runtime.server.ipc import Stats

PREFIXES = ("spark:", "vllm:")
FIRST = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120)  # seconds
BETWEEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)
WHOLE = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600, 1800)
Read = Callable[[], tuple[Stats, float]]


class Metrics:
    """The counters of one server. `read` gives the engine's counters and its last step's age."""

    def __init__(self, model: str, read: Read) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(model, read))
        self._model = model
        self._prompt = self._counters("prompt_tokens", "Prompt tokens of accepted requests")
        self._generated = self._counters("generation_tokens", "Tokens generated")
        self._ended = self._counters("request_success", "Requests ended", "finished_reason")
        self._refused = self._counters("admission_rejections", "Requests refused: queue full")
        self._first = self._times("time_to_first_token_seconds", FIRST)
        self._between = self._times("inter_token_latency_seconds", BETWEEN)
        self._whole = self._times("e2e_request_latency_seconds", WHOLE)

    def accepted(self, prompt_tokens: int) -> None:
        """A request went to the engine."""
        for counter in self._prompt:
            counter.labels(self._model).inc(prompt_tokens)

    def refused(self) -> None:
        """A request met a full queue."""
        for counter in self._refused:
            counter.labels(self._model).inc()

    def tokens(self, count: int, seconds: float, first: bool) -> None:
        """A round of tokens came, `seconds` after the request (the first) or the round before."""
        for counter in self._generated:
            counter.labels(self._model).inc(count)
        for times in self._first if first else self._between:
            times.labels(self._model).observe(seconds)

    def ended(self, reason: str, seconds: float) -> None:
        """A choice ended, `seconds` after its request came."""
        for counter in self._ended:
            counter.labels(self._model, reason).inc()
        for times in self._whole:
            times.labels(self._model).observe(seconds)

    def render(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)

    def _counters(self, name: str, text: str, *labels: str) -> list[Counter]:
        names = ("model_name", *labels)
        return [Counter(p + name, text, names, registry=self.registry) for p in PREFIXES]

    def _times(self, name: str, buckets: tuple[float, ...]) -> list[Histogram]:
        text, label = name.replace("_", " "), ["model_name"]
        return [
            Histogram(p + name, text, label, buckets=buckets, registry=self.registry)
            for p in PREFIXES
        ]


class Stopwatch:
    """The times of one choice, told to `metrics`."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._start = self._last = time.monotonic()
        self._first = True

    def tokens(self, count: int) -> None:
        """`count` tokens of one round came."""
        now = time.monotonic()
        self._metrics.tokens(count, now - self._last, self._first)
        self._last, self._first = now, False

    def end(self, reason: str) -> None:
        """The choice ended. Boards know a cancelled one as `abort`."""
        reason = "abort" if reason == "cancelled" else reason
        self._metrics.ended(reason, time.monotonic() - self._start)


class _EngineCollector(Collector):
    def __init__(self, model: str, read: Read) -> None:
        self._model = model
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """Called at each scrape."""
        stats, age = self._read()
        for prefix in PREFIXES:
            yield self._gauge(prefix + "num_requests_running", stats.running)
            yield self._gauge(prefix + "num_requests_waiting", stats.waiting)
            yield self._gauge(prefix + "kv_cache_usage_perc", stats.kv_usage)
            yield self._counter(prefix + "num_preemptions", {"": stats.preemptions})
            yield self._counter(prefix + "corrupted_requests", {"": stats.errors})
        yield self._gauge("spark:free_slots", stats.free_slots)
        yield self._gauge("spark:last_step_age_seconds", age)
        yield self._counter("spark:engine_launches", stats.buckets, "bucket")
        yield self._counter("spark:padded_rows", {"": stats.padded_rows})
        yield from self._cache(stats)
        yield from self._drafts(stats)

    def _cache(self, stats: Stats) -> Iterator[Metric]:
        """Tokens, but for states, bytes and evictions; all 0 where there is no cache."""
        for prefix in PREFIXES:
            yield self._counter(prefix + "prefix_cache_queries", {"": stats.prefix_queries})
            yield self._counter(prefix + "prefix_cache_hits", {"": stats.prefix_hits})
        name = "spark:prefix_cache_"
        yield self._counter(name + "misses", {"": stats.prefix_queries - stats.prefix_hits})
        yield self._counter(name + "lost_for_state", {"": stats.prefix_lost_for_state})
        evicted = {"page": stats.evicted_pages, "state": stats.evicted_snapshots}
        yield self._counter(name + "evictions", evicted, "kind")
        yield self._gauge(name + "states", stats.snapshots)
        yield self._gauge(name + "state_rows", stats.snapshot_rows)
        yield self._gauge(name + "bytes", stats.cache_bytes)
        yield self._gauge(name + "budget_bytes", stats.cache_budget)

    def _drafts(self, stats: Stats) -> Iterator[Metric]:
        """Nothing of an engine without a draft head."""
        verified, kept = stats.drafts_by_position, stats.accepted_by_position
        if not verified:
            return
        positions = {str(i): n for i, n in enumerate(kept)}
        for prefix in PREFIXES:
            name = prefix + "spec_decode_num_"
            yield self._counter(name + "drafts", {"": stats.draft_rounds})
            yield self._counter(name + "draft_tokens", {"": sum(verified)})
            yield self._counter(name + "accepted_tokens", {"": sum(kept)})
            yield self._counter(name + "accepted_tokens_per_pos", positions, "position")
        rounds = {str(k): n for k, n in sorted(stats.rounds_by_k.items())}
        yield self._counter("spark:rounds", rounds, "drafts")
        tried = {str(i): n for i, n in enumerate(verified)}
        yield self._counter("spark:spec_decode_num_draft_tokens_per_pos", tried, "position")
        if (mean := stats.tokens_per_round) is not None:
            yield self._gauge("spark:tokens_per_round", mean)

    def _gauge(self, name: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, _words(name), labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, values: dict[str, int], label: str = "") -> Metric:
        labels = ["model_name", label] if label else ["model_name"]
        family = CounterMetricFamily(name, _words(name), labels=labels)
        for key, value in values.items():
            family.add_metric([self._model, key] if label else [self._model], value)
        return family


def _words(name: str) -> str:
    return name.partition(":")[2].replace("_", " ")
