"""The engine's metrics in /metrics, read from its latest report at each scrape.

Knows names and labels: ours, and vLLM's for dashboards that use them.
"""

import platform
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from spark_engine.interface import MTP, Limits
from spark_engine.runtime.engine.draft_counts import DraftCounts
from spark_engine.runtime.server.engine_client.ipc import Stats
from spark_engine.runtime.server.operation.release import release

PREFIXES = ("spark:", "vllm:")
Labels = TypeVar("Labels", str, tuple[str, str])
Read = Callable[[], tuple[Stats, float]]
Loaded = Callable[[], tuple[bool, int]]
Pid = Callable[[], int | None]


class Engines(Collector):
    """The metrics of several engines: each family once, with the samples of all."""

    def __init__(self) -> None:
        self.rows: list[Collector] = []

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        for row in self.rows:
            for metric in row.collect():
                if (known := found.setdefault(metric.name, metric)) is not metric:
                    known.samples += metric.samples
        yield from found.values()


class EngineCollector(Collector):
    """The engine's counters and description, time and memory of its process `pid`. `read` returns
    the counters and the last step's age in seconds.

    `limits` None omits the description, `loaded` None whether and how often it was loaded.
    """

    def __init__(
        self,
        model: str,
        read: Read,
        limits: Limits | None = None,
        pid: Pid = lambda: None,
        loaded: Loaded | None = None,
    ) -> None:
        self.model, self._read = model, read
        self._limits, self._loaded = limits, loaded
        self._process = ProcessCollector("spark_engine", lambda: pid() or -1, registry=None)
        self._release = {"commit": "", **release(), "python": platform.python_version()}

    def collect(self) -> Iterator[Metric]:
        stats, age = self._read()
        for prefix in PREFIXES:
            yield self._gauge(prefix + "num_requests_running", stats.running)
            yield self._gauge(prefix + "num_requests_waiting", stats.waiting)
            yield self._gauge(prefix + "kv_cache_usage_perc", stats.kv_usage)
            yield self._counter(prefix + "num_preemptions", {"": stats.preemptions})
            yield self._counter(prefix + "corrupted_requests", {"": stats.errors})
        yield self._gauge("vllm:gpu_cache_usage_perc", stats.kv_usage)  # its name until 0.10
        yield self._gauge("vllm:num_requests_swapped", stats.swapped)
        yield self._gauge("spark:free_slots", stats.free_slots)
        yield self._gauge("spark:last_step_age_seconds", age)
        yield self._counter("spark:engine_steps", {"": stats.steps})
        yield self._counter("spark:engine_restarts", {"": stats.restarts})
        yield self._counter("spark:engine_launches", stats.buckets, "bucket")
        yield self._counter("spark:padded_rows", {"": stats.padded_rows})
        yield from self._cache(stats)
        yield from self._drafts(stats)
        yield from self._infos(stats)
        if self._loaded is not None:
            now, loads = self._loaded()
            yield self._gauge("spark:engine_loaded", now)
            yield self._counter("spark:engine_loads", {"": loads})
        for metric in self._process.collect():
            if self._loaded is not None:  # several may have one
                mine = {"model_name": self.model}
                metric.samples = [s._replace(labels=s.labels | mine) for s in metric.samples]
            yield metric

    def _infos(self, stats: Stats) -> Iterator[Metric]:
        """A gauge of 1 with facts as labels."""
        yield self._info("spark:build", self._release)
        if (limits := self._limits) is None:
            return
        sizes = {"max_seqs": limits.max_seqs, "max_model_len": limits.max_context}
        sizes |= {"pages": limits.pages, "page_size": limits.page_size, "drafts": limits.drafts}
        yield self._info("spark:engine", {name: str(value) for name, value in sizes.items()})
        yield self._gauge("spark:slots", limits.max_seqs)
        config = {"block_size": str(limits.page_size), "num_gpu_blocks": str(limits.pages)}
        cached = {"enable_prefix_caching": str(stats.cache_budget > 0)}
        yield self._info("vllm:cache_config", config | cached)

    def _cache(self, stats: Stats) -> Iterator[Metric]:
        """Tokens, except states, bytes and evictions; all 0 without a cache."""
        for prefix in PREFIXES:
            yield self._counter(prefix + "prefix_cache_queries", {"": stats.prefix_queries})
            yield self._counter(prefix + "prefix_cache_hits", {"": stats.prefix_hits})
        name = "spark:prefix_cache_"
        yield self._counter(name + "misses", {"": stats.prefix_queries - stats.prefix_hits})
        yield self._counter(name + "lost_for_state", {"": stats.prefix_lost_for_state})
        evicted = {"page": stats.evicted_pages, "state": stats.evicted_snapshots}
        evicted |= {"file": stats.disk_evicted, "bad_file": stats.disk_refused}
        yield self._counter(name + "evictions", evicted, "kind")
        yield self._gauge(name + "states", stats.snapshots)
        yield self._gauge(name + "state_rows", stats.snapshot_rows)
        yield self._gauge(name + "bytes", stats.cache_bytes)
        yield self._gauge(name + "budget_bytes", stats.cache_budget)
        yield self._gauge(name + "disk_bytes", stats.disk_bytes)
        yield self._gauge(name + "disk_budget_bytes", stats.disk_budget)
        yield self._counter(name + "disk_read_bytes", {"": stats.disk_read})

    def _drafts(self, stats: Stats) -> Iterator[Metric]:
        """Empty for an engine without a draft head."""
        most = self._limits.drafts if self._limits else len(stats.drafts_by_position)
        if not most:
            return
        verified = stats.drafts_by_position or [0] * most
        kept = stats.accepted_by_position or [0] * most
        positions = {str(i): n for i, n in enumerate(kept)}
        yield self._counter("vllm:spec_decode_num_accepted_tokens_per_pos", positions, "position")
        for prefix in PREFIXES:
            name = prefix + "spec_decode_num_"
            yield self._counter(name + "drafts", {"": stats.draft_rounds})
            yield self._counter(name + "draft_tokens", {"": sum(verified)})
            yield self._counter(name + "accepted_tokens", {"": sum(kept)})
        rounds = {str(k): stats.rounds_by_k.get(k, 0) for k in range(most + 1)}
        yield self._counter("spark:rounds", rounds, "drafts")
        sources = stats.by_source or {MTP: DraftCounts.zeros(most)}
        tried = {(str(i), s): n for s, one in sources.items() for i, n in enumerate(one.verified)}
        right = {(str(i), s): n for s, one in sources.items() for i, n in enumerate(one.kept)}
        labels = ("position", "source")
        yield self._counter("spark:spec_decode_num_draft_tokens_per_pos", tried, *labels)
        yield self._counter("spark:spec_decode_num_accepted_tokens_per_pos", right, *labels)
        if (mean := stats.tokens_per_round) is not None:
            yield self._gauge("spark:tokens_per_round", mean)

    def _gauge(self, name: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, _words(name), labels=["model_name"])
        family.add_metric([self.model], value)
        return family

    def _counter(self, name: str, values: Mapping[Labels, int], *labels: str) -> Metric:
        """`values` by the value of the label, or those of several."""
        family = CounterMetricFamily(name, _words(name), labels=["model_name", *labels])
        for key, value in values.items():
            own: tuple[str, ...] = (key,) if isinstance(key, str) else key
            family.add_metric([self.model, *own[: len(labels)]], value)
        return family

    def _info(self, name: str, facts: Mapping[str, str]) -> Metric:
        family = InfoMetricFamily(name, _words(name), labels=["model_name"])
        family.add_metric([self.model], dict(facts))
        return family


def _words(name: str) -> str:
    return name.partition(":")[2].replace("_", " ")
