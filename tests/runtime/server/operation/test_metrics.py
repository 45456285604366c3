"""What is counted of a request, by the names that boards ask for."""

import asyncio
import os
from types import SimpleNamespace

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from spark_engine.interface import Limits
from spark_engine.runtime.engine.request import Event, FinishReason, Request, SamplingParams
from spark_engine.runtime.server.engine_client.client import Started
from spark_engine.runtime.server.engine_client.ipc import Stats
from spark_engine.runtime.server.http.routes import ROUTES, page_routes
from spark_engine.runtime.server.operation import metrics as module
from spark_engine.runtime.server.operation.engine_metrics import EngineCollector
from spark_engine.runtime.server.operation.metrics import REASONS, Metrics, Stopwatch
from spark_engine.runtime.server.page.live import live
from spark_engine.runtime.server.service.generation import CompletionChoice, Deadline, Generation
from spark_engine.runtime.text.text_stream import TextStream
from tests.runtime.fake_client import FakeClient

LIMITS = Limits(max_seqs=4, max_context=64, pages=5, vocab=512)


def _metrics() -> Metrics:
    return Metrics(EngineCollector("m", lambda: (Stats(), 0.0), LIMITS, os.getpid))


def samples(metrics: Metrics) -> dict[str, float]:
    """Every sample by its name and labels but the model's, as in a query."""
    found = {}
    for family in text_string_to_metric_families(metrics.render(by_key=True).decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            words = ",".join(f"{k}={v}" for k, v in sorted(labels.items()))
            found[f"{sample.name}{{{words}}}"] = sample.value
    return found


def test_series_are_there_at_zero() -> None:
    """Those of a real server: test_boards.py."""
    metrics = _metrics()
    metrics.add_routes([("POST", "/v1/completions")])
    metrics.add_key("ann", ["requests"])
    found = samples(metrics)
    for name in (
        "prompt_tokens_total{}",
        *(f"request_success_total{{finished_reason={r}}}" for r in REASONS),
    ):
        assert found["spark:" + name] == found["vllm:" + name] == 0, name
    assert found["vllm:gpu_cache_usage_perc{}"] == found["vllm:num_requests_swapped{}"] == 0
    metrics.turned_away(408)
    turned = "http_requests_total{handler=none,method=none,status=408}"
    assert found[turned] == 0 and samples(metrics)[turned] == 1
    key = "http_requests_total{handler=/v1/completions,method=POST,status=%d}"
    assert [found[key % status] for status in (200, 400, 429, 503)] == [0] * 4
    assert found["spark:key_limited_total{key=ann,limit=requests}"] == 0


def test_the_processes_and_what_they_are() -> None:
    found = samples(_metrics())
    own, engine = found["process_open_fds{}"], found["spark_engine_process_open_fds{}"]
    assert own == engine > 3, "the test names itself as the engine"
    assert found["spark_engine_process_resident_memory_bytes{}"] > 1 << 20
    (build,) = (name for name in found if name.startswith("spark:build_info{"))
    assert "python=3" in build and "version=" in build and found[build] == 1
    assert "commit=" in build, "also where it is not known: a series keeps its labels"
    sizes = "drafts=0,max_model_len=64,max_seqs=4,page_size=64,pages=5"
    assert found[f"spark:engine_info{{{sizes}}}"] == 1
    cache = "block_size=64,enable_prefix_caching=False,num_gpu_blocks=5"
    assert found[f"vllm:cache_config_info{{{cache}}}"] == 1


def test_a_scrape_is_small() -> None:
    """Prometheus reads it every few seconds; the text of all names was 139 KB."""
    buckets = {f"decode_b{i}": 1 for i in range(8)}
    metrics = Metrics(
        EngineCollector("tiny", lambda: (Stats(buckets=buckets), 0.0), LIMITS, os.getpid)
    )
    routes = (*ROUTES, *page_routes())
    metrics.add_routes((route.method, route.path) for route in routes)
    assert len(metrics.render()) < 36_000, "before anybody used it"
    for route in routes:
        for status in (200, 401):
            metrics.http(route.method, route.path, status, 0.2)
    text = metrics.render().decode()
    assert len(text) < 40_000, "when every route was used, and refused a request"
    assert "_created" not in text


def test_the_page_reads_a_few_numbers() -> None:
    metrics = _metrics()
    metrics.accepted(7)
    for seconds in (0.03, 0.03, 4.0):
        metrics.tokens(2, seconds, first=True)
    Stopwatch(metrics).end("stop")
    found = live(metrics, Stats(running=3, kv_usage=0.5, drafts_by_position=[4, 2]), drafts=2)
    assert (found["prompt"], found["generated"], found["ended"]) == (7, 6, 1)
    assert (found["running"], found["kv"]) == (3, 0.5)
    bounds = {bound: count for bound, count in found["first"]}
    assert (bounds[0.02], bounds[0.05], bounds[2], bounds[5], bounds[None]) == (0, 2, 2, 3, 3)
    assert list(bounds)[-1] is None and found["drafts"] == 6 and found["between"][-1] == [None, 0]
    assert "drafts" not in live(metrics, Stats(), drafts=0)
    assert len(msgspec.json.encode(found)) < 1000


def test_an_engine_that_is_gone_shows_no_process() -> None:
    found = samples(Metrics(EngineCollector("m", lambda: (Stats(), 0.0), None, lambda: None)))
    assert not any(name.startswith("spark_engine_process") for name in found)
    assert not any("engine_info" in name for name in found)


def test_the_phases_of_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    metrics = _metrics()
    watch = Stopwatch(metrics, prompt=40)
    watch.started = 102.0
    for at, count in ((105.0, 1), (109.0, 3), (113.0, 1)):
        now[0] = at
        watch.tokens(count)
    now[0] = 114.0
    watch.end("length")
    found = samples(metrics)
    wanted = {
        "time_to_first_token_seconds": (1, 5),
        "inter_token_latency_seconds": (2, 8),
        "request_queue_time_seconds": (1, 2),
        "request_prefill_time_seconds": (1, 3),
        "request_decode_time_seconds": (1, 8),
        "request_inference_time_seconds": (1, 11),
        "request_time_per_output_token_seconds": (1, 2),
        "e2e_request_latency_seconds": (1, 14),
        "request_prompt_tokens": (1, 40),
        "request_generation_tokens": (1, 5),
    }
    for name, pair in wanted.items():
        got = tuple(found[f"vllm:{name}_{part}{{}}"] for part in ("count", "sum"))
        assert got == pair, name
    for prefix in ("spark:", "vllm:"):
        assert found[prefix + "generation_tokens_total{}"] == 5
        assert found[prefix + "request_success_total{finished_reason=length}"] == 1
    assert found["vllm:time_per_output_token_seconds_sum{}"] == 8


def test_a_choice_that_never_began_has_no_phases() -> None:
    metrics = _metrics()
    Stopwatch(metrics, 7).end("cancelled")
    found = samples(metrics)
    assert found["vllm:request_success_total{finished_reason=abort}"] == 1
    assert found["vllm:request_prompt_tokens_sum{}"] == 7
    for phase in ("queue", "prefill", "decode", "inference"):
        assert found[f"vllm:request_{phase}_time_seconds_count{{}}"] == 0


def _end(number: int, tokens: int) -> list[Event | Started]:
    rows: list[Event | Started] = [Started(number, 0.0), Started(number, 1e9)]
    return rows + [
        Event(number, 40, finish=FinishReason.LENGTH if i == tokens - 1 else None)
        for i in range(tokens)
    ]


def test_what_is_counted_by_prompt() -> None:

    async def run() -> Metrics:
        client, metrics = FakeClient(), _metrics()
        params = SamplingParams(max_tokens=6)
        prompts = [(1, 2), (1, 2, 3)]
        choices = [
            CompletionChoice(Request(prompt, params), TextStream(None, params, (1,)))
            for prompt in prompts
            for _ in range(2)
        ]
        generation = Generation(client, metrics, choices, 4, Deadline(None))  # type: ignore[arg-type]
        for number, tokens in enumerate((2, 6, 3, 1)):
            for one in _end(number, tokens):
                generation._box.put_nowait(one if isinstance(one, Started) else [one])
        async for _ in generation.pieces():
            pass
        return metrics

    found = samples(asyncio.run(run()))
    assert found["vllm:request_max_num_generation_tokens_sum{}"] == 6 + 3
    assert found["vllm:request_max_num_generation_tokens_count{}"] == 2
    assert found["vllm:request_params_n_sum{}"] == 4
    assert found["vllm:request_params_max_tokens_sum{}"] == 12
    assert found["vllm:request_queue_time_seconds_count{}"] == 4
    assert found["vllm:request_queue_time_seconds_sum{}"] == 0, "the first time that it began"
    assert found["vllm:request_prompt_tokens_sum{}"] == 10
