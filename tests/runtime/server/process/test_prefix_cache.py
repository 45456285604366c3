"""The prefix cache as clients see it: a real engine behind HTTP, warm and cold answers compared."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import patient
from tests.ports import served
from tests.runtime import small_engine

CONTEXT, TILE = 2048, 64
SYSTEM = "You are a bear that knows every river, and all the fish in it. " * 2
WEATHER = {
    "name": "weather",
    "description": "Says what the weather is in a city, now and tomorrow.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TOOLS: Any = [{"type": "function", "function": WEATHER}]


@dataclass
class Server:
    """A server's address and the last lines that it logged."""

    url: str
    log: Path

    def chat(self, messages: list[Any], **more: Any) -> dict[str, Any]:
        """A greedy answer of 12 tokens, whole."""
        body = {"messages": messages, "tools": TOOLS, "temperature": 0, "max_tokens": 12, **more}
        body |= {"ignore_eos": True, "tool_choice": "auto"}
        done = patient.post(self.url + "/v1/chat/completions", json=body)
        assert done.status_code == 200, done.text
        found: dict[str, Any] = done.json()
        return found

    def metrics(self) -> dict[str, float]:
        lines = patient.get(self.url + "/metrics").text.splitlines()
        rows = (line.rsplit(" ", 1) for line in lines if "prefix_cache" in line and line[0] != "#")
        return {name.replace('model_name="small"', ""): float(value) for name, value in rows}


@contextmanager
def serving(engine: Path, log: Path, *options: str) -> Iterator[Server]:
    with served(str(engine), "--served-model-name", "small", *options, log=log, start_s=120) as url:
        yield Server(url, log)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_engine.build(tmp_path_factory.mktemp("cache"), tokenizer=True, context=CONTEXT)


@pytest.fixture(scope="module")
def warm(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(engine, tmp_path_factory.mktemp("warm") / "log") as server:
        yield server


@pytest.fixture(scope="module")
def cold(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(engine, tmp_path_factory.mktemp("cold") / "log", "--cache-gib", "0") as server:
        yield server


def _cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def _turns(server: Server, name: str, count: int) -> list[dict[str, Any]]:
    """The answers of an agent that gets a tool's result in every turn."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    messages.append({"role": "user", "content": f"I am {name}. Where is it warm?"})
    answers = []
    for turn in range(count):
        answers.append(server.chat(messages))
        said = answers[-1]["choices"][0]["message"]
        call = {"name": "weather", "arguments": json.dumps({"city": f"Paris {turn}"})}
        calls = [{"id": f"c{turn}", "type": "function", "function": call}]
        messages.append({"role": "assistant", "content": said["content"], "tool_calls": calls})
        result = f"{turn + 10} degrees, and the river is {turn} m deep, so that fish are many"
        messages.append({"role": "tool", "tool_call_id": f"c{turn}", "content": result})
    return answers


def test_of_ten_turns_each_computes_what_is_new(warm: Server, cold: Server) -> None:
    found, plain = _turns(warm, "ann", 10), _turns(cold, "ann", 10)
    texts = [[answer["choices"][0]["message"] for answer in rows] for rows in (found, plain)]
    assert texts[0] == texts[1]
    assert set(map(_cached, plain)) == {0}
    lengths = [answer["usage"]["prompt_tokens"] for answer in found]
    assert lengths == [answer["usage"]["prompt_tokens"] for answer in plain] == sorted(lengths)
    cached = [_cached(answer) for answer in found]
    for turn in range(1, 10):
        new = lengths[turn] - lengths[turn - 1]
        assert lengths[turn] - cached[turn] <= new + 2 * TILE, (turn, lengths, cached)
    assert cached[1:] == sorted(set(cached[1:])), "it grows with every turn"
    assert cached[-1] > 0.6 * lengths[-1]


def test_two_agents_share_system_and_tools_from_the_first_turn(warm: Server) -> None:
    _turns(warm, "ben", 1)
    other = _turns(warm, "cleo", 1)[0]
    assert _cached(other) >= 2 * TILE
    assert other["usage"]["prompt_tokens"] - _cached(other) < 3 * TILE


def test_choices_and_prompts_with_one_beginning_compute_it_once(warm: Server) -> None:
    begin = [5 + (7 * i) % 211 for i in range(320)]
    before = warm.metrics()
    body = {"prompt": [[*begin, 9 + i] for i in range(4)], "n": 2, "max_tokens": 1}
    answer = patient.post(warm.url + "/v1/completions", json=body).json()
    assert len(answer["choices"]) == 8
    after = warm.metrics()
    grown = {name: after[name] - before[name] for name in after}
    asked = 8 * 321
    assert grown["vllm:prefix_cache_queries_total{}"] == asked
    assert grown["vllm:prefix_cache_hits_total{}"] >= 7 * 320
    assert grown["spark:prefix_cache_misses_total{}"] <= 320 + 8 * (TILE + 1)
    assert _cached(answer) >= 3 * 320


def test_what_is_said_and_counted(warm: Server, cold: Server) -> None:
    assert ", with a prefix cache of up to " in warm.log.read_text()
    assert ", without a prefix cache on http" in cold.log.read_text()
    cache, none = warm.metrics(), cold.metrics()
    assert 0 < cache["spark:prefix_cache_bytes{}"] <= cache["spark:prefix_cache_budget_bytes{}"]
    assert 0 < cache["spark:prefix_cache_states{}"] <= cache["spark:prefix_cache_state_rows{}"]
    assert none["spark:prefix_cache_budget_bytes{}"] == none["spark:prefix_cache_bytes{}"] == 0
    assert none["vllm:prefix_cache_hits_total{}"] == 0


def test_a_conversation_continues_after_a_restart(engine: Path, tmp_path: Path) -> None:
    """SIGTERM right after the answer; what was cached then is there for the next process."""
    folder, messages = tmp_path / "cache", [{"role": "user", "content": SYSTEM * 2}]
    options = ("--cache-dir", str(folder), "--cache-dir-gib", "0.5")
    with serving(engine, tmp_path / "first", *options) as server:
        first = server.chat(messages)
    with serving(engine, tmp_path / "second", *options) as server:
        again, found = server.chat(messages), server.metrics()
        assert again["choices"] == first["choices"] and _cached(first) == 0 < _cached(again)
        name = "spark:prefix_cache_disk_"
        bad = 'spark:prefix_cache_evictions_total{kind="bad_file",}'
        assert found[name + "read_bytes_total{}"] > 0 == found[bad]
        assert 0 < found[name + "bytes{}"] <= found[name + "budget_bytes{}"] == 1 << 29
        assert "prefix cache on disk: 0.00 of 0.50 GiB in " in server.log.read_text()
