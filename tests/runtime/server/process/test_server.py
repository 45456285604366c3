"""The server as a client sees it: real processes, a scripted engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from spark_engine.runtime.engine.engine import EngineOptions
from spark_engine.runtime.server.engine_client.client import EngineDied
from spark_engine.runtime.server.process.options import ServerOptions
from spark_engine.runtime.server.process.server import serve, worker_command
from tests import patient
from tests.ports import free_port
from tests.repository import PATH
from tests.runtime import fake_engine, small_tokenizer

FAKE = Path(fake_engine.__file__)
THOUGHT, ANSWER = "I add é 🙂.", fake_engine.ANSWER
USER: Any = [{"role": "user", "content": "What is 40 plus 2?"}]
EXIT_S = 60
STEPS = "spark:engine_launches_total"


@dataclass(frozen=True)
class Running:
    """A server process and its clients."""

    process: subprocess.Popen[bytes]
    url: str

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key="x", max_retries=0, timeout=60)

    def metric(self, name: str) -> float:
        lines = _get(self.url + "/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))

    @property
    def worker(self) -> int:
        """The engine process."""
        (found,) = (pid for pid in self.children if b"ipc://" in _command(pid))
        return found

    @property
    def children(self) -> list[int]:
        """The server's processes."""
        pid = self.process.pid
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def _get(url: str) -> httpx.Response:
    return patient.get(url, verify=False)  # loading certificates takes longer than the answer


def _wait(ok: Callable[[], bool], what: str, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not ok():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def _healthy(url: str) -> bool:
    try:
        return _get(url + "/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_tokenizer.write(tmp_path_factory.mktemp("engine") / "tokenizer")


@contextmanager
def _server(
    folder: Path, log: Path | None = None, shell: str = "", **options: object
) -> Iterator[Running]:
    """`log` is standard error; `shell` runs before the server, in its process."""
    port = free_port()
    words = json.dumps({"port": port, **options})
    command = [sys.executable, str(FAKE), "server", str(folder), words]
    with nullcontext() if log is None else log.open("wb") as target:
        process = subprocess.Popen(
            ["sh", "-c", f'{shell}\nexec "$@"', "sh", *command],
            env={**os.environ, "PYTHONPATH": PATH},
            stderr=target,
        )
    running = Running(process, f"http://127.0.0.1:{port}")
    try:
        _wait(lambda: _healthy(running.url) or process.poll() is not None, "the start", 120)
        assert process.poll() is None
        yield running
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def server(tokenizer_folder: Path) -> Iterator[Running]:
    with _server(tokenizer_folder, names=["fake", "alias"]) as running:
        yield running


def test_chat_whole(server: Running) -> None:
    answer = server.client.chat.completions.create(model="fake", messages=USER, max_tokens=60)
    choice = answer.choices[0]
    assert choice.message.reasoning_content == THOUGHT  # type: ignore[attr-defined]
    assert choice.message.content is not None and choice.message.content.startswith(ANSWER)
    assert choice.finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 60
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 60


def test_chat_stream_equals_the_whole(server: Running) -> None:
    whole = server.client.chat.completions.create(model="alias", messages=USER, max_tokens=60)
    chunks = list(
        server.client.chat.completions.create(
            model="fake",
            messages=USER,
            max_completion_tokens=60,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    assert deltas[0].role == "assistant"
    reasoning = [getattr(d, "reasoning_content", None) or "" for d in deltas]
    assert "".join(reasoning) == THOUGHT
    assert sum(map(bool, reasoning)) > 1
    assert "".join(d.content or "" for d in deltas) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage == whole.usage and chunks[-1].choices == []


def test_thinking_can_be_switched_off(server: Running) -> None:
    answers = [
        server.client.chat.completions.create(
            model="fake",
            messages=USER,
            max_tokens=40,
            extra_body={"chat_template_kwargs": {"enable_thinking": thinking}},
        )
        for thinking in (False, True)
    ]
    plain, thought = (answer.choices[0].message for answer in answers)
    assert (plain.content or "").startswith(ANSWER) and "think>" not in str(plain.content)
    assert not hasattr(plain, "reasoning_content")
    assert thought.reasoning_content == THOUGHT  # type: ignore[attr-defined]
    counts = [answer.usage.prompt_tokens for answer in answers if answer.usage]
    assert counts[0] > counts[1], "the template closes the block that it had left open"


TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls(server: Running, stream: bool) -> None:
    messages: Any = [{"role": "user", "content": "TOOL"}]
    kwargs: Any = {"model": "fake", "messages": messages, "tools": TOOLS, "stream": stream}
    answer: Any = server.client.chat.completions.create(**kwargs)
    if stream:
        choices = [c.choices[0] for c in answer]
        parts = [call for c in choices for call in c.delta.tool_calls or []]
        assert not any("<" in (c.delta.content or "") for c in choices)
        # the id and the name come first, once; the arguments as they are written
        assert [bool(p.id and p.function.name) for p in parts] == [True] + [False] * (
            len(parts) - 1
        )
        assert {p.index for p in parts} == {0}
        name, text = parts[0].function.name, "".join(p.function.arguments for p in parts)
        reason = choices[-1].finish_reason
    else:
        (call,), reason = answer.choices[0].message.tool_calls, answer.choices[0].finish_reason
        assert answer.choices[0].message.content is None
        name, text = call.function.name, call.function.arguments
    assert (name, json.loads(text)) == ("weather", {"city": "Paris"})
    assert reason == "tool_calls"


TEXTS: dict[int, str] = {}  # of the one vocabulary of these servers' tokens, once asked for


def _tokens(server: Running, text: str) -> list[str]:
    """The text of each token of an ASCII text."""
    ids = patient.post(server.url + "/tokenize", json={"prompt": text}).json()["tokens"]
    url = server.url + "/detokenize"
    with httpx.Client(timeout=patient.WAIT_S) as client:
        for i in set(ids) - TEXTS.keys():
            TEXTS[i] = client.post(url, json={"tokens": [i]}).json()["prompt"]
    return [TEXTS[i] for i in ids]


def _metrics(server: Running) -> dict[str, float]:
    """Every sample by its name and labels."""
    lines = patient.get(server.url + "/metrics").text.splitlines()
    rows = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in rows}


def test_completions_whole_and_streamed_with_every_prompt_form(server: Running) -> None:
    client = server.client
    ids = patient.post(server.url + "/tokenize", json={"prompt": "ab"}).json()["tokens"]
    for prompt in ("ab", ["ab", "cd"], ids, [ids, ids]):
        count = 2 if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
        answer = client.completions.create(model="fake", prompt=prompt, max_tokens=30, n=2)
        assert [c.index for c in answer.choices] == list(range(2 * count))
        texts = {i: "" for i in range(2 * count)}
        for chunk in client.completions.create(
            model="fake", prompt=prompt, max_tokens=30, n=2, stream=True
        ):
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert [c.text for c in answer.choices] == list(texts.values())
        assert len(texts[0]) > 20


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_over_token_edges_ends_the_answer(server: Running, stream: bool) -> None:
    before, steps = server.metric("spark:request_success_total"), server.metric(STEPS)
    pieces = _tokens(server, ANSWER)
    assert not any("is 42" in piece for piece in pieces), "it spans two tokens"
    ends = [i for i in range(len(pieces)) if "is 42" in "".join(pieces[:i])]
    body = {"prompt": "SLOW", "max_tokens": 400, "stop": ["is 42", "zzz"], "stream": stream}
    answer: Any = server.client.completions.create(model="fake", **body)  # type: ignore[call-overload]
    if stream:
        chunks = list(answer)
        text, reason = "".join(c.choices[0].text for c in chunks), chunks[-1].choices[0]
    else:
        text, reason = answer.choices[0].text, answer.choices[0]
        assert answer.usage.completion_tokens == ends[0]
    assert text == "The answer "
    assert (reason.finish_reason, reason.stop_reason) == ("stop", "is 42")
    _wait(lambda: server.metric("spark:num_requests_running") == 0, "the slot is free")
    assert server.metric("spark:request_success_total") == before + 1
    assert server.metric(STEPS) - steps < 380, "it ran to its end"  # 400 steps take 8 s


def test_stop_ids_token_ids_and_echo(server: Running) -> None:
    url = server.url + "/v1/completions"
    body = {"prompt": "ab", "max_tokens": 9, "return_token_ids": True, "echo": True}
    choice = patient.post(url, json=body).json()["choices"][0]
    shown = patient.post(server.url + "/detokenize", json={"tokens": choice["token_ids"]}).json()
    assert len(choice["token_ids"]) == 9
    assert choice["text"] == "ab" + shown["prompt"]
    last = choice["token_ids"][4]
    body |= {"stop_token_ids": [last], "stream": True, "echo": False}
    lines = [line[6:] for line in patient.post(url, json=body).text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    rows = [json.loads(line)["choices"][0] for line in lines]
    cut = choice["token_ids"].index(last) + 1
    assert [i for row in rows for i in row.get("token_ids", [])] == choice["token_ids"][:cut]
    assert rows[-1]["finish_reason"] == "stop"


def test_logprobs_in_both_forms(server: Running) -> None:
    chat = server.client.chat.completions.create(
        model="fake", messages=USER, max_tokens=3, logprobs=True, top_logprobs=2
    )
    assert chat.choices[0].logprobs is not None and chat.choices[0].logprobs.content is not None
    first = chat.choices[0].logprobs.content[0]
    assert (first.logprob, len(first.top_logprobs)) == (-0.5, 2)
    assert len(chat.choices[0].logprobs.content) == 3
    text = server.client.completions.create(model="fake", prompt="a", max_tokens=3, logprobs=2)
    rows = text.choices[0].logprobs
    assert rows is not None and rows.tokens is not None
    assert "".join(rows.tokens) == text.choices[0].text
    assert rows.token_logprobs == [-0.5] * 3 and rows.text_offset is not None
    assert rows.text_offset[1] == len(rows.tokens[0])


def test_usage_can_come_with_every_chunk(server: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "a", "max_tokens": 5, "stream": True, "stream_options": options}
    lines = patient.post(server.url + "/v1/completions", json=body).text.split("\n\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] == 5
    assert chunks[-1]["choices"] == []


@pytest.mark.parametrize("chat", [False, True])
def test_a_round_of_tokens_is_one_chunk(server: Running, chat: bool) -> None:
    before = _metrics(server)
    body: dict[str, Any] = {"max_tokens": 11, "return_token_ids": True, "n": 2}
    body |= {"messages": [{"role": "user", "content": "ROUND"}]} if chat else {"prompt": "ROUND"}
    body |= {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
    url = server.url + ("/v1/chat/completions" if chat else "/v1/completions")
    whole = patient.post(url, json=body).json()
    options = {"include_usage": True}
    lines = patient.post(url, json={**body, "stream": True, "stream_options": options}).text
    chunks = [json.loads(line[6:]) for line in lines.split("\n\n") if line.startswith("data: {")]
    details = {"accepted_prediction_tokens": 16, "rejected_prediction_tokens": 8}
    for usage in (whole["usage"], chunks.pop()["usage"]):
        assert usage["completion_tokens"] == 22
        assert usage["completion_tokens_details"] == details
    for i, choice in enumerate(whole["choices"]):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == i]
        rounds = [row["token_ids"] for row in mine if row["token_ids"]]
        assert [len(ids) for ids in rounds] == [3, 3, 3, 2]
        assert sum(rounds, []) == choice["token_ids"]
        rows = [row["logprobs"] for row in mine if row.get("logprobs")]
        for key in ["content"] if chat else ["tokens", "top_logprobs", "text_offset"]:
            assert [len(row[key]) for row in rows] == [3, 3, 3, 2]
            assert sum((row[key] for row in rows), []) == choice["logprobs"][key]
    after = _metrics(server)
    between = 'vllm:inter_token_latency_seconds_count{model_name="fake"}'
    assert after[between] - before.get(between, 0) == 12
    wanted = {"generation_tokens_total": 44.0}
    names = {"drafts": 16, "draft_tokens": 48, "accepted_tokens": 32}
    wanted |= {f"spec_decode_num_{name}_total": n for name, n in names.items()}
    for prefix in ("spark:", "vllm:"):
        keys = {f'{prefix}{name}{{model_name="fake"}}': n for name, n in wanted.items()}
        name = prefix + "spec_decode_num_accepted_tokens_per_pos_total"
        for i, n in enumerate((16, 16, 0)):
            keys[f'{name}{{model_name="fake",position="{i}"}}'] = n
        for key, more in keys.items():
            assert after[key] - before.get(key, 0) == more, key
    key = 'spark:rounds_total{drafts="3",model_name="fake"}'
    assert after[key] - before.get(key, 0) == 16
    assert after['spark:tokens_per_round{model_name="fake"}'] == 3


@pytest.mark.parametrize("chat", [True, False])
def test_cached_tokens_stand_in_every_usage(server: Running, chat: bool) -> None:
    for word in ("WARM", "COLD"):
        body: dict[str, Any] = {"max_tokens": 3, "n": 2}
        body |= {"messages": [{"role": "user", "content": word}]} if chat else {"prompt": word}
        url = server.url + ("/v1/chat/completions" if chat else "/v1/completions")
        whole = patient.post(url, json=body).json()["usage"]
        cached = whole["prompt_tokens"] - 1 if word == "WARM" else 0
        assert whole["prompt_tokens_details"] == {"cached_tokens": cached}
        options = {"include_usage": True, "continuous_usage_stats": True}
        lines = patient.post(url, json={**body, "stream": True, "stream_options": options}).text
        chunks = [json.loads(row[6:]) for row in lines.split("\n\n") if row.startswith("data: {")]
        found = [c["usage"]["prompt_tokens_details"]["cached_tokens"] for c in chunks]
        assert found[-1] == cached and set(found) <= {0, cached}
        assert chunks[-1]["usage"] == whole


def test_the_prefix_cache_in_the_metrics(server: Running) -> None:
    before = _metrics(server)
    server.client.completions.create(model="fake", prompt="ROUND", max_tokens=6)
    after = _metrics(server)
    tokens = {"queries": 60, "hits": 40, "misses": 20, "lost_for_state": 2}
    for name, more in tokens.items():
        key = f'prefix_cache_{name}_total{{model_name="fake"}}'
        for prefix in ("spark:", "vllm:") if name in ("queries", "hits") else ("spark:",):
            assert after[prefix + key] - before.get(prefix + key, 0) == more, prefix + key
    now = {"states": 2, "state_rows": 5, "bytes": 1 << 20, "budget_bytes": 1 << 22}
    for name, value in now.items():
        assert after[f'spark:prefix_cache_{name}{{model_name="fake"}}'] == value
    for kind, value in (("page", 3), ("state", 4)):
        name = f'spark:prefix_cache_evictions_total{{kind="{kind}",model_name="fake"}}'
        assert after[name] == value


def test_models_version_health_and_other_paths(server: Running) -> None:
    models = server.client.models.list().data
    assert [m.id for m in models] == ["fake", "alias"]
    assert models[0].max_model_len == 512 and models[0].root == "fake"  # type: ignore[attr-defined]
    assert server.client.models.retrieve("alias").id == "alias"
    assert patient.get(server.url + "/health").json() == {"status": "ok"}
    assert patient.get(server.url + "/version").json()["version"]
    for status, answer in (
        (404, patient.get(server.url + "/v1/nothing")),
        (404, patient.get(server.url + "/v1/models/none")),
        (405, patient.get(server.url + "/v1/completions")),
    ):
        assert (answer.status_code, "message" in answer.json()["error"]) == (status, True)


def test_metrics_have_our_names_and_vllms(server: Running) -> None:
    before = _metrics(server)
    server.client.completions.create(model="fake", prompt="ab cd", max_tokens=5)
    after = _metrics(server)
    steps = 'spark:engine_launches_total{bucket="decode_8",model_name="fake"}'
    assert after[steps] >= before.get(steps, 0) + 5
    length = len(_tokens(server, "ab cd"))
    for prefix in ("spark:", "vllm:"):
        for name, more in (
            ("num_requests_running", 0),
            ("num_requests_waiting", 0),
            ("kv_cache_usage_perc", 0),
            ("num_preemptions_total", 0),
            ("corrupted_requests_total", 0),
            ("prompt_tokens_total", length),
            ("generation_tokens_total", 5),
        ):
            key = f'{prefix}{name}{{model_name="fake"}}'
            assert after[key] - before.get(key, 0) == more, key
        key = f'{prefix}request_success_total{{finished_reason="length",model_name="fake"}}'
        assert after[key] == before.get(key, 0) + 1
    times = {"time_to_first_token": 1, "inter_token_latency": 4, "e2e_request_latency": 1}
    for name, more in times.items():
        for part in ('_count{model_name="fake"}', '_bucket{le="+Inf",model_name="fake"}'):
            key = f"vllm:{name}_seconds{part}"
            assert after[key] - before.get(key, 0) == more, key


def test_32_clients_at_once_get_whole_answers(server: Running) -> None:
    prompts = [f"ECHO of the bear {i:02d} " for i in range(32)]  # each has a different answer

    def ask(i: int) -> tuple[str, int]:
        chunks = server.client.completions.create(
            model="fake", prompt=prompts[i], max_tokens=20 + i, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        text, tokens = "", 0
        for chunk in chunks:
            text += chunk.choices[0].text if chunk.choices else ""
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        return text, tokens

    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(ask, range(32)))
    wanted = ["".join((_tokens(server, p) * 50)[: 20 + i]) for i, p in enumerate(prompts)]
    assert len(set(wanted)) == 32
    assert answers == [(text, 20 + i) for i, text in enumerate(wanted)]
    assert server.metric("spark:num_requests_running") == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(server: Running, stream: bool) -> None:
    body = {"prompt": "SLOW", "max_tokens": 500, "stream": stream, "n": 3}
    _wait(lambda: server.metric("spark:num_requests_running") == 0, "what ran before has ended")
    steps = server.metric(STEPS)
    with httpx.Client(timeout=patient.WAIT_S) as client:
        request = client.build_request("POST", server.url + "/v1/completions", json=body)
        if stream:
            response = client.send(request, stream=True)
            lines = response.iter_lines()  # one that is dropped closes the connection
            next(lines)
            _wait(lambda: server.metric("spark:num_requests_running") == 3, "three run")
            response.close()
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.send(client.build_request(
                    "POST", request.url, json=body, timeout=httpx.Timeout(60, read=0.3)
                ))  # fmt: skip
    _wait(lambda: server.metric("spark:num_requests_running") == 0, "all have ended")
    assert server.metric(STEPS) - steps < 480, "they ran to their end"  # 500 steps take 10 s
    assert server.metric("spark:free_slots") == fake_engine.SLOTS


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
GOOD = {"messages": USER}
MALFORMED: list[tuple[str, Any, int, str]] = [
    (TEXT, b"{", 400, "not valid JSON"),
    (TEXT, b"\xff\xfe", 400, "not valid JSON"),
    (TEXT, b"", 400, "not valid JSON"),
    (TEXT, [], 400, "JSON object"),
    (TEXT, {}, 400, "prompt"),
    (TEXT, {"prompt": ""}, 400, "empty"),
    (TEXT, {"prompt": []}, 400, "prompt is []"),
    (TEXT, {"prompt": None}, 400, "prompt is None"),
    (TEXT, {"prompt": 7}, 400, "prompt is 7"),
    (TEXT, {"prompt": ["a", 1]}, 400, "prompt is ['a', 1]"),
    (TEXT, {"prompt": [[1], []]}, 400, "none empty"),
    (TEXT, {"prompt": [99999]}, 400, "99999"),
    (TEXT, {"prompt": [-1]}, 400, "-1"),
    (TEXT, {"prompt": [True]}, 400, "True"),
    (TEXT, {"prompt": "a", "bad_words": ["x", " "]}, 400, "more than blanks"),
    (TEXT, {"prompt": "a", "mirostat": 2}, 400, "use temperature"),
    (TEXT, {"prompt": "a", "stop": "x", "detokenize": False}, 400, "stop needs text"),
    (TEXT, {"prompt": "a", "truncate_prompt_tokens": 512}, 400, "truncate_prompt_tokens is 512"),
    (CHAT, {**GOOD, "modalities": ["text", "audio"]}, 400, "say ['text']"),
    (CHAT, {**GOOD, "functions": [{"name": "f"}], "tools": []}, 400, "functions and tools"),
    (TEXT, {"prompt": "a b " * 600}, 400, "context length is 512 tokens"),
    (TEXT, {"prompt": "\ud800"}, 400, "half of a character"),
    (TEXT, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens is 0"),
    (TEXT, {"prompt": "a", "max_tokens": -2}, 400, "max_tokens is -2"),
    (TEXT, {"prompt": "a", "logit_bias": {"1" * 5000: 1}}, 400, "logit_bias"),
    (TEXT, {"prompt": "a", "priority": 10**20 - 1}, 400, "priority"),
    (TEXT, {"prompt": "a", "priority": 1}, 400, "--allow-priority"),
    (TEXT, {"prompt": "a", "drafts": 8}, 400, "drafts is 8; it must be from 0 to 7"),
    (TEXT, {"prompt": "a", "drafts": -1}, 400, "drafts is -1"),
    (CHAT, {**GOOD, "drafts": 1.5}, 400, "drafts"),
    (TEXT, {"prompt": ["a"] * 200_000, "n": 512}, 400, "102400000 answers"),
    (TEXT, {"prompt": "a" * 24_000_000}, 400, "prompt is too long: 24000000 bytes"),
    (CHAT, {"messages": [{"role": "user", "content": "a" * 24_000_000}]}, 400, "bytes"),
    (TEXT, {"prompt": "a", "max_tokens": "x"}, 400, "max_tokens is 'x'"),
    (TEXT, {"prompt": "a", "max_tokens": 5, "min_tokens": 6}, 400, "min_tokens is 6"),
    (TEXT, {"prompt": "a", "temperature": -0.1}, 400, "-0.1"),
    (TEXT, {"prompt": "a", "temperature": 1e9}, 400, "temperature"),
    (TEXT, {"prompt": "a", "temperature": "hot"}, 400, "'hot'"),
    (TEXT, {"prompt": "a", "top_p": 0}, 400, "top_p is 0"),
    (TEXT, {"prompt": "a", "top_p": 1.1}, 400, "1.1"),
    (TEXT, {"prompt": "a", "top_k": -2}, 400, "-2"),
    (TEXT, {"prompt": "a", "min_p": 2}, 400, "min_p is 2"),
    (TEXT, {"prompt": "a", "presence_penalty": 3}, 400, "presence_penalty is 3"),
    (TEXT, {"prompt": "a", "frequency_penalty": -3}, 400, "frequency_penalty is -3"),
    (TEXT, {"prompt": "a", "repetition_penalty": 0}, 400, "repetition_penalty is 0"),
    (TEXT, {"prompt": "a", "n": 0}, 400, "n is 0"),
    (TEXT, {"prompt": ["a"] * 100, "n": 100}, 400, "10000"),
    (TEXT, {"prompt": "a", "best_of": 2}, 400, "best_of"),
    (TEXT, {"prompt": "a", "stop": ["x", ""]}, 400, "empty string"),
    (TEXT, {"prompt": "a", "stop": [1]}, 400, "stop"),
    (TEXT, {"prompt": "a", "stop": ["x"] * 17}, 400, "17"),
    (TEXT, {"prompt": "a", "stop_token_ids": [99999]}, 400, "99999"),
    (TEXT, {"prompt": "a", "logit_bias": {"x": 1}}, 400, "'x'"),
    (TEXT, {"prompt": "a", "logit_bias": {"5": 101}}, 400, "101"),
    (TEXT, {"prompt": "a", "logit_bias": {"99999": 1}}, 400, "99999"),
    (TEXT, {"prompt": "a", "logprobs": 21}, 400, "21"),
    (TEXT, {"prompt": "a", "seed": 1.5}, 400, "1.5"),
    (TEXT, {"prompt": "a", "suffix": "z"}, 400, "suffix"),
    (TEXT, {"prompt": "a", "stream_options": {}}, 400, "stream: true"),
    (TEXT, {"prompt": "a", "guided_json": {"type": 3}}, 400, "guided_json"),
    (TEXT, {"prompt": "a", "model": "gpt-4"}, 404, "gpt-4"),
    (CHAT, {}, 400, "messages"),
    (CHAT, {"messages": []}, 400, "empty"),
    (CHAT, {"messages": "hi"}, 400, "'hi'"),
    (CHAT, {"messages": [{"content": "x"}]}, 400, "role"),
    (CHAT, {"messages": [{"role": "user", "content": 3}]}, 400, "content is 3"),
    (CHAT, {"messages": [{"role": 3, "content": "x"}]}, 400, "role is 3"),
    (CHAT, {**GOOD, "continue_final_message": True}, 400, "needs an assistant's"),
    (CHAT, {**GOOD, "top_logprobs": 2}, 400, "logprobs: true"),
    (CHAT, {**GOOD, "logprobs": True, "top_logprobs": 30}, 400, "30"),
    (CHAT, {**GOOD, "tools": [{"type": "function"}]}, 400, "tools[0]"),
    (CHAT, {**GOOD, "tool_choice": "required"}, 400, "required"),
    (CHAT, {**GOOD, "response_format": {"type": "xml"}}, 400, "xml"),
    (CHAT, {**GOOD, "chat_template_kwargs": {"messages": []}}, 400, "messages"),
    ("/tokenize", {}, 400, "prompt or messages"),
    ("/detokenize", {"tokens": [-4]}, 400, "-4"),
]


def test_malformed_requests_get_a_message_and_the_server_lives(server: Running) -> None:
    with httpx.Client(base_url=server.url, timeout=patient.WAIT_S) as client:
        for path, body, status, words in MALFORMED:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = client.post(path, content=data)
            assert answer.status_code == status, (body, answer.text)
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert words in error["message"], (body, error)
        assert client.post(TEXT, json={"prompt": "a", "unknown": 1}).status_code == 200
        for schema in (
            [None],
            {"properties": 3},
            {"properties": {"a": {"type": [{}], "anyOf": 1}}},
        ):
            tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
            assert client.post(CHAT, json={**GOOD, "max_tokens": 2, "tools": [tool]}).is_success
        assert _peak_mb(server.process.pid) < 300
        everything_null = dict.fromkeys(("stop", "n", "seed", "logit_bias", "stream_options"))
        assert client.post(TEXT, json={"prompt": "a", **everything_null}).status_code == 200


def _peak_mb(pid: int) -> float:
    """What the process ever held in memory, in MB."""
    rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    (peak,) = (row.split()[1] for row in rows if row.startswith("VmHWM"))
    return int(peak) * 1024 / 1e6


def test_openai_raises_its_own_errors(server: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature is -1") as caught:
        server.client.chat.completions.create(model="fake", messages=USER, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        server.client.chat.completions.create(model="other", messages=USER)
    with pytest.raises(openai.BadRequestError) as caught:
        server.client.completions.create(model="fake", prompt="a b " * 600)
    assert caught.value.code == "context_length_exceeded"


def test_a_request_that_the_engine_gives_up_is_an_error(server: Running) -> None:
    with pytest.raises(openai.InternalServerError, match="not finite"):
        server.client.completions.create(model="fake", prompt="NAN")
    with pytest.raises(openai.APIError, match="not finite"):
        list(server.client.completions.create(model="fake", prompt="NAN", stream=True))
    assert server.client.completions.create(model="fake", prompt="fine").choices[0].text


def _ask_in_thread(server: Running, prompt: str, **body: Any) -> list[BaseException | object]:
    """Starts a completion in a thread; the returned list gets its answer or exception."""
    result: list[BaseException | object] = []

    def ask() -> None:
        try:
            result.append(server.client.completions.create(model="fake", prompt=prompt, **body))
        except Exception as error:
            result.append(error)

    threading.Thread(target=ask, daemon=True).start()
    return result


def test_a_killed_engine_is_noticed_by_everyone(tokenizer_folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with _server(tokenizer_folder, log, grace_s=600.0, restarts=0) as server:
        worker = server.worker
        results = [_ask_in_thread(server, "SLOW", max_tokens=500) for _ in range(3)]
        _wait(lambda: server.metric("spark:num_requests_running") == 3, "three run")
        body = {"model": "fake", "prompt": "SLOW", "max_tokens": 500, "stream": True}
        stream: Any = server.client.completions.create(**body)  # type: ignore[call-overload]
        next(iter(stream))
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(openai.APIError, match="the engine stopped and does not start again"):
            list(stream)
        _wait(lambda: all(results), "every request has an end")
        assert all(isinstance(r[0], openai.InternalServerError) for r in results)
        health = patient.get(server.url + "/health")
        assert health.status_code == 503 and "does not start again" in health.json()["reason"]
        with pytest.raises(openai.InternalServerError):
            server.client.completions.create(model="fake", prompt="x")
        server.process.terminate()  # before its time to answer is over
        assert server.process.wait(EXIT_S) == 1
    assert "ended with code -9 (SIGKILL: out of memory?" in log.read_text()


def test_a_step_that_raises_again_and_again_ends_the_server_with_its_words(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    with _server(tokenizer_folder, grace_s=0.2, restarts=1, dumps=str(tmp_path)) as server:
        beside = [_ask_in_thread(server, "SLOW", max_tokens=500) for _ in range(3)]
        _wait(lambda: server.metric("spark:num_requests_running") == 3, "three run")
        with pytest.raises(openai.InternalServerError, match="the engine stopped and does not"):
            server.client.completions.create(model="fake", prompt="BOOM")
        _wait(lambda: all(beside), "every request has an end")
        assert all("the engine stopped" in str(result[0]) for result in beside)
        assert server.process.wait(EXIT_S) == 1, "by itself"
    first, second = sorted(tmp_path.iterdir())
    for dump in (first, second):
        assert "RuntimeError: the step went wrong" in dump.read_text()


def test_an_engine_that_stalls_twice_fails_the_cause_and_continues(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    with _server(tokenizer_folder, watchdog_s=4.0, dumps=str(tmp_path)) as server:
        worker = server.worker
        result = _ask_in_thread(server, "STALL")
        _wait(lambda: bool(result), "the request has an end")
        assert getattr(result[0], "status_code", None) == 500
        assert "is starting again" in str(result[0])
        _wait(lambda: _healthy(server.url), "it serves again")
        assert server.worker != worker and server.metric("spark:engine_restarts_total") == 2
        answer = server.client.completions.create(model="fake", prompt="x", max_tokens=3)
        assert answer.usage is not None and answer.usage.completion_tokens == 3
    dump = min(tmp_path.iterdir()).read_text()
    assert "_advance" in dump and '"live":[0]' in dump, "the stack, and the running requests"


def test_a_stalled_engine_leaves_with_a_server_that_is_killed(tokenizer_folder: Path) -> None:
    with _server(tokenizer_folder, timeout_s=1.0) as server:
        result = _ask_in_thread(server, "STALL")
        _wait(lambda: bool(result), "the request has an end")
        assert getattr(result[0], "status_code", None) == 504
        worker = server.worker
        command = Path(f"/proc/{worker}/cmdline").read_text()
        socket_file = Path(command.rstrip("\0").rpartition("ipc://")[2])
        assert socket_file.exists()
        server.process.kill()
        _wait(lambda: not Path(f"/proc/{worker}/cwd").exists(), "the engine left too")
        assert not socket_file.parent.exists()


def test_a_full_disk_takes_words_and_nothing_else(tokenizer_folder: Path) -> None:
    """Neither process can write to its log, and no dump can be written."""
    log = Path("/dev/full")
    with _server(tokenizer_folder, log, dumps="/proc") as server:
        with pytest.raises(openai.InternalServerError, match="the engine stopped"):
            server.client.completions.create(model="fake", prompt="BOOM")
        _wait(lambda: _healthy(server.url), "it serves again")
        answer = server.client.completions.create(model="fake", prompt="x", max_tokens=3)
        assert answer.usage is not None and answer.usage.completion_tokens == 3
        server.process.terminate()
        server.process.wait(EXIT_S)


def test_sigterm_drains_and_exits_with_zero(tokenizer_folder: Path) -> None:
    with _server(tokenizer_folder) as server:
        result = _ask_in_thread(server, "SLOW", max_tokens=300)
        _wait(lambda: server.metric("spark:num_requests_running") == 1, "it runs")
        server.process.terminate()
        _wait(lambda: _get(server.url + "/ready").status_code == 503, "it drains")
        for path, reason in (("/ready", "draining"), ("/health", "draining")):
            answer = _get(server.url + path)
            assert (answer.status_code, reason in answer.text) == (503, True)
        for path in (TEXT, "/tokenize"):
            new = patient.post(server.url + path, json={"prompt": "x", "max_tokens": 2})
            assert new.status_code == 503 and "send the request elsewhere" in new.text
            assert (new.headers["retry-after"], new.headers["connection"]) == ("1", "close")
        assert not result, "the request still runs"
        _wait(lambda: bool(result), "the answer has come")
        _wait(lambda: _refused(server.url), "no new connections after the last answer")
        assert result[0].usage.completion_tokens == 300  # type: ignore[attr-defined]
        assert server.process.wait(EXIT_S) == 0


def test_processes_that_are_stopped_do_not_keep_the_server(tokenizer_folder: Path) -> None:
    """Those that read prompts: others take over, and the server ends on a signal."""
    with _server(tokenizer_folder) as server:
        (forking,) = (pid for pid in server.children if b"prompts.worker" in _command(pid))
        workers = Path(f"/proc/{forking}/task/{forking}/children").read_text().split()
        for pid in (*map(int, workers), forking):
            os.kill(pid, signal.SIGSTOP)
        assert server.client.completions.create(model="fake", prompt="a b", max_tokens=2).choices
        (forking,) = (pid for pid in server.children if b"prompts.worker" in _command(pid))
        os.kill(forking, signal.SIGSTOP)
        server.process.terminate()
        assert server.process.wait(EXIT_S) == 0


def test_a_server_that_says_it_serves_answers_signals(tokenizer_folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, str(FAKE), "server", str(tokenizer_folder), '{"port": 0}'],
        env={**os.environ, "PYTHONPATH": PATH},
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    with process.stderr as said:
        while b"serving" not in (line := said.readline()):
            assert line, "it ended before it served"
        process.terminate()
        assert process.wait(EXIT_S) == 0


def _refused(url: str) -> bool:
    try:
        _get(url + "/health")
    except httpx.NetworkError:  # refused, or reset where it was accepted as the listener closed
        return True
    except httpx.RemoteProtocolError:  # it was closed as one between two requests is
        return False
    return False


def test_the_drain_has_a_deadline(tokenizer_folder: Path) -> None:
    with _server(tokenizer_folder, drain_timeout_s=0.3) as server:
        chunks = server.client.completions.create(
            model="fake", prompt="SLOW", max_tokens=500, stream=True
        )
        next(iter(chunks))
        server.process.terminate()
        reasons = [c.choices[0].finish_reason for c in chunks]
        assert reasons[-1] == "abort" and len(reasons) < 450
        assert server.process.wait(EXIT_S) == 0


def test_a_full_queue_says_when_to_come_back(tokenizer_folder: Path) -> None:
    """The engine process is stopped: no running or waiting request ends."""
    options: dict[str, Any] = {"max_queue": 2, "api_key": "a key of the test", "names": ["m"]}
    with _server(tokenizer_folder, watchdog_s=0.0, **options) as server:
        url, key = server.url + TEXT, {"Authorization": "Bearer a key of the test"}
        assert patient.post(url, json={"prompt": "a"}).status_code == 401
        assert patient.post(
            url, json={"prompt": "a"}, headers={"Authorization": "Bearer x"}
        ).is_error
        assert patient.get(server.url + "/v1/models").status_code == 401
        body = {"prompt": "x", "n": fake_engine.SLOTS + 3, "max_tokens": 120}
        assert patient.post(url, json=body, headers=key).status_code == 400  # more than ever fit
        body["n"] = fake_engine.SLOTS + 2
        os.kill(server.worker, signal.SIGSTOP)
        with ThreadPoolExecutor() as pool:
            first = pool.submit(patient.post, url, json=body, headers=key)
            load = server.url + "/load"
            _wait(lambda: patient.get(load, headers=key).json()["server_load"] == 10, "it is full")
            answer = patient.post(url, json={"prompt": "a"}, headers=key)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"]["code"] == "queue_full"
            os.kill(server.worker, signal.SIGCONT)
            assert first.result().status_code == 200
        assert server.metric("spark:admission_rejections_total") == 1


def test_few_descriptors_and_many_idle_sockets(tokenizer_folder: Path, tmp_path: Path) -> None:
    log, hard = tmp_path / "log", "ulimit -Sn 40; ulimit -Hn 64"
    with _server(tokenizer_folder, log, hard) as server, ExitStack() as idle:
        (row,) = (
            line
            for line in Path(f"/proc/{server.process.pid}/limits").read_text().splitlines()
            if line.startswith("Max open files")
        )
        assert row.split()[3:5] == ["64", "64"], "the limit is raised as far as it may be"
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        for i in range(100):
            idle.enter_context(closing(socket.create_connection(address)))
            if i % 10 == 9:
                assert _healthy(server.url)
                answer = server.client.completions.create(model="fake", prompt="a", max_tokens=2)
                assert answer.usage is not None and answer.usage.completion_tokens == 2
        before = _cpu_s(server)
        time.sleep(1.5)  # in which one that spins has a core
        assert _cpu_s(server) - before < 0.75, "it spins"
        assert _healthy(server.url)
        words = log.read_text()
        assert len(words) < 5000 and "Traceback" not in words
        assert "this process may open 64 files" in words


def _cpu_s(server: Running) -> float:
    """Seconds of processor time so far."""
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(
    ("host", "key"), [("0.0.0.0", None), ("0.0.0.0", "k"), ("127.0.0.1", None)]
)
def test_an_open_door_is_said_aloud(
    host: str, key: str | None, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    options = ServerOptions(host=host, port=0, api_key=key)
    with pytest.raises(EngineDied):
        asyncio.run(serve(("false",), tmp_path, options))
    warned = [r for r in caplog.records if "may use this server" in r.getMessage()]
    assert len(warned) == (host == "0.0.0.0" and key is None)


def test_the_engine_process_starts_in_any_folder(tmp_path: Path) -> None:
    """The root of a clone holds a `spark_engine` that is not the whole package (and here none)."""
    clone = tmp_path / "spark_engine"
    clone.mkdir()
    (clone / "__init__.py").write_text("raise ImportError('taken from the current folder')")
    command = [*worker_command(tmp_path / "none", EngineOptions()), f"ipc://{tmp_path}/socket"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        input="",
        text=True,
        timeout=60,
    )
    assert "current folder" not in done.stderr
    assert done.returncode in (0, 2), "it ran: no engine, or no parent any more"
