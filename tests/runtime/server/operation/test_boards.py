"""Every panel of our Grafana board, and of vLLM's, fills from a real server's /metrics."""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.repository import ROOT
from tests.runtime import small_tokenizer
from tests.runtime.server.operation.promql import Panels, Scrape
from tests.runtime.server.process.test_server import _server

BOARD = json.loads((ROOT / "docs" / "deploy" / "grafana.json").read_text())
KEYS = '[[key]]\nname = "ann"\nkey = "a"\nrequests_per_minute = 5\n'
SPAN = 2.0  # seconds that the two scrapes are taken to be apart


def _queries() -> list[tuple[str, str]]:
    rows = [(p["title"], t["expr"]) for p in BOARD["panels"] for t in p.get("targets", ())]
    assert len(rows) > 50
    return rows


# vLLM's board (examples/observability): the series of each panel.
_TIMES = {"E2E latency": "e2e_request_latency_seconds", "TTFT": "time_to_first_token_seconds"}
_TIMES |= {"ITL": "inter_token_latency_seconds", "TPOT": "time_per_output_token_seconds"}
_SUMS = [f"request_{phase}_time_seconds" for phase in ("queue", "prefill", "decode")]
_OF = '{model_name="$model_name"}'
VLLM = [
    *((p, f"histogram_quantile(0.99, sum by(le) (rate(vllm:{n}_bucket{_OF}[$__rate_interval])))")
      for p, n in _TIMES.items()),
    *((p, f"rate(vllm:{n}_sum{_OF}[5m]) / rate(vllm:{n}_count{_OF}[5m])")
      for p, n in _TIMES.items()),
    *((n, f"rate(vllm:{n}_sum{_OF}[5m])") for n in (*_SUMS, "request_max_num_generation_tokens")),
    *((n, f"sum by(le) (increase(vllm:{n}_bucket{_OF}[5m]))")
      for n in ("request_prompt_tokens", "request_generation_tokens")),
    *((n, f"rate(vllm:{n}_total{_OF}[5m])") for n in ("prompt_tokens", "generation_tokens")),
    *((n, f"vllm:num_requests_{n}{_OF}") for n in ("running", "waiting", "swapped")),
    *((n, f"vllm:{n}{_OF}") for n in ("kv_cache_usage_perc", "gpu_cache_usage_perc")),
    ("ends", f"sum by(finished_reason) (increase(vllm:request_success_total{_OF}[5m]))"),
]  # fmt: skip


@pytest.fixture(scope="module")
def panels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Panels]:
    """A server with a key and a draft head, before and after a few requests."""
    folder = tmp_path_factory.mktemp("board")
    tokenizer = small_tokenizer.write(folder / "tokenizer")
    (folder / "keys").write_text(KEYS)
    keys, bodies = str(folder / "keys"), ["ROUND", "WARM", "NAN", "x", "y"]
    with _server(tokenizer, api_keys=keys, metrics_by_key=True) as server:
        headers = {"Authorization": "Bearer a"}
        with httpx.Client(base_url=server.url, headers=headers) as client:
            scrapes = [client.get("/metrics").text]
            for prompt in bodies:
                body: dict[str, Any] = {"prompt": prompt, "max_tokens": 8}
                client.post("/v1/completions", json=body)
            assert client.post("/v1/completions", json=body).status_code == 429
            scrapes.append(client.get("/metrics").text)
    yield Panels(*map(Scrape.of, scrapes), SPAN)


def _filled(query: str) -> str:
    query = re.sub(r"\$__rate_interval", "5m", query)
    return query.replace('=~"$model"', '=~".*"').replace("$model_name", "fake")


@pytest.mark.parametrize(("panel", "query"), _queries())
def test_our_board_fills(panels: Panels, panel: str, query: str) -> None:
    assert panels.compute(_filled(query)), f"{panel} stays empty"


@pytest.mark.parametrize(("panel", "query"), VLLM)
def test_vllms_board_fills(panels: Panels, panel: str, query: str) -> None:
    value = panels.compute(_filled(query))
    assert value and not all(math.isnan(v) for v in value.values()), f"{panel} stays empty"


def _one(panels: Panels, title: str, at: int = 0) -> dict[str, float]:
    query = [q for name, q in _queries() if name == title][at]
    value = panels.compute(_filled(query))
    return {",".join(v for _, v in sorted(labels)): v for labels, v in value.items()}


def test_the_panels_show_what_happened(panels: Panels) -> None:
    # five requests of which one failed at its first token
    assert _one(panels, "Throughput") == {"": 4 * 8 / SPAN}
    ends = _one(panels, "How choices end")
    assert (ends["length"], ends["error"], ends["stop"]) == (4 / SPAN, 1 / SPAN, 0)
    shown = _one(panels, "HTTP answers by status")
    assert shown["/v1/completions,200"] == 4 / SPAN, shown
    assert (shown["/v1/completions,429"], shown["/v1/completions,500"]) == (1 / SPAN, 1 / SPAN)
    refused = {"ann,requests": 1 / SPAN, "ann,tokens": 0, "ann,at_once": 0}
    assert _one(panels, "Refused", 1) == refused
    assert 0 < _one(panels, "Time to the first token")[""] < 5
    assert _one(panels, "Tokens by key")["ann,completion"] == 4 * 8 / SPAN
    assert _one(panels, "Draft acceptance by place") == {"0": 1.0, "1": 1.0, "2": 0.0}
    assert _one(panels, "Requests", 4) == {"": 8}


def test_the_first_scrape_has_the_labels_of_later_ones(panels: Panels) -> None:
    before, after = panels.before, panels.after
    assert before.samples.keys() ^ after.samples.keys() <= {"spark:tokens_per_round"}
    for name, rows in after.samples.items():
        if "http_" not in name and name != "spark:tokens_per_round":
            assert before.samples[name].keys() == rows.keys(), name
    (facts,) = before.samples["vllm:cache_config_info"]
    assert dict(facts)["enable_prefix_caching"] == "True"


def test_every_series_is_on_a_page(panels: Panels) -> None:
    pages = (ROOT / "docs" / "operate" / "monitoring.md").read_text()
    for name, kind in panels.after.kinds.items():
        plain = re.sub(r"^(spark|vllm):|_(total|bucket|sum|count|created|info)$", "", name)
        plain = re.sub(r"_(bucket|sum|count|created|total)$", "", plain)
        process = re.match(r"(spark_engine_)?process_|python_info", name)
        assert process or plain in pages, f"{name}, a {kind}"


def test_the_board_is_whole() -> None:
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    known = {row["name"] for row in BOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(BOARD["panels"])))
    assert used - {"__rate_interval"} <= known
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24 and panel["title"]
        assert panel["type"] == "row" or panel["description"].endswith(".")


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("spark:nothing", "there is no spark:nothing"),
        ('spark:slots{model="x"}', "has no label model"),
        ("rate(spark:slots[1m])", "a gauge"),
        ("sum by (le) (rate(spark:generation_tokens_total[1m]))", "lacks one of"),
        ("histogram_quantile(0.5, rate(spark:generation_tokens_total[1m]))", "bounds"),
    ],
)
def test_a_query_with_a_mistake_is_seen(panels: Panels, query: str, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        panels.compute(query)
