"""The server as a client sees it: real processes, a scripted engine."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from spark_engine.runtime.engine.engine import EngineOptions
from spark_engine.runtime.server.engine_client.client import EngineDied
from spark_engine.runtime.server.process.open_service import worker_command
from spark_engine.runtime.server.process.options import ServerOptions
from spark_engine.runtime.server.process.server import serve
from tests import patient
from tests.patient import wait
from tests.ports import free_port
from tests.repository import PATH
from tests.runtime import fake_engine
from tests.runtime.server.api.api_client import CHAT, TEXT

FAKE = Path(fake_engine.__file__)
THOUGHT, ANSWER = "I add é 🙂.", fake_engine.ANSWER
USER: Any = [{"role": "user", "content": "What is 40 plus 2?"}]
EXIT_S = 60
STEPS = "spark:engine_launches_total"


@dataclass(frozen=True)
class Running:
    process: subprocess.Popen[bytes]
    url: str

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key="x", max_retries=0, timeout=60)

    def metrics(self) -> dict[str, float]:
        """Every sample by its name and labels."""
        lines = _get(self.url + "/metrics").text.splitlines()
        rows = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in rows}

    def metric(self, name: str) -> float:
        return sum(n for labels, n in self.metrics().items() if labels.startswith(name + "{"))

    @property
    def worker(self) -> int:
        (found,) = (pid for pid in self.children if b"ipc://" in _command(pid))
        return found

    @property
    def children(self) -> list[int]:
        pid = self.process.pid
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def _get(url: str) -> httpx.Response:
    return patient.get(url, verify=False)  # loading certificates takes longer than the answer


def _healthy(url: str) -> bool:
    try:
        return _get(url + "/health").status_code == 200
    except httpx.TransportError:
        return False


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
        wait(lambda: _healthy(running.url) or process.poll() is not None, "the start", 120)
        assert process.poll() is None
        yield running
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def server(tokenizer_folder: Path) -> Iterator[Running]:
    with _server(tokenizer_folder, names=["fake", "alias"]) as running:
        yield running


def test_a_chat_streamed_is_the_whole(server: Running) -> None:
    whole = server.client.chat.completions.create(model="alias", messages=USER, max_tokens=60)
    message, usage = whole.choices[0].message, whole.usage
    assert message.reasoning_content == THOUGHT  # type: ignore[attr-defined]
    assert message.content is not None and message.content.startswith(ANSWER)
    assert whole.choices[0].finish_reason == "length"
    assert usage is not None and usage.completion_tokens == 60
    assert usage.total_tokens == usage.prompt_tokens + 60
    body: Any = {"messages": USER, "max_completion_tokens": 60, "stream": True}
    options = {"include_usage": True}
    create = server.client.chat.completions.create
    chunks = list(create(model="fake", stream_options=options, **body))
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    assert deltas[0].role == "assistant"
    reasoning = [getattr(d, "reasoning_content", None) or "" for d in deltas]
    assert "".join(reasoning) == THOUGHT
    assert sum(map(bool, reasoning)) > 1
    assert "".join(d.content or "" for d in deltas) == message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage == usage and chunks[-1].choices == []


def test_a_tool_call_is_streamed(server: Running) -> None:
    messages: Any = [{"role": "user", "content": "TOOL"}]
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    kwargs: Any = {"model": "fake", "messages": messages, "tools": tools, "stream": True}
    choices = [c.choices[0] for c in server.client.chat.completions.create(**kwargs)]
    first, *more = [call for c in choices for call in c.delta.tool_calls or []]
    assert not any("<" in (c.delta.content or "") for c in choices)
    # the id and the name come first, once; the arguments as they are written
    assert first.id and first.function.name == "weather"
    assert {first.index} == {p.index for p in more}
    assert not any(p.id or p.function.name for p in more)
    text = "".join(p.function.arguments for p in (first, *more))
    assert (json.loads(text), choices[-1].finish_reason) == ({"city": "Paris"}, "tool_calls")


def test_completions_whole_and_streamed_with_every_prompt_form(server: Running) -> None:
    client = server.client
    ids = patient.post(server.url + "/tokenize", json={"prompt": "ab"}).json()["tokens"]
    for prompt in ("ab", ["ab", "cd"], ids, [ids, ids]):
        count = 2 if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
        answer = client.completions.create(model="fake", prompt=prompt, max_tokens=30, n=2)
        assert [c.index for c in answer.choices] == list(range(2 * count))
        texts = {i: "" for i in range(2 * count)}
        body: Any = {"prompt": prompt, "max_tokens": 30, "n": 2, "stream": True}
        for chunk in client.completions.create(model="fake", **body):
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert [c.text for c in answer.choices] == list(texts.values())
        assert len(texts[0]) > 20


def _both(server: Running, body: dict[str, Any], **options: Any) -> tuple[Any, list[Any]]:
    """The whole answer, and the chunks of a stream of it."""
    url = server.url + (CHAT if "messages" in body else TEXT)
    whole = patient.post(url, json=body).json()
    stream = {"stream": True, "stream_options": {"include_usage": True, **options}}
    lines = patient.post(url, json={**body, **stream}).text.split("\n\n")
    return whole, [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize("chat", [False, True])
def test_a_round_of_tokens_is_one_chunk(server: Running, chat: bool) -> None:
    before = server.metrics()
    body: dict[str, Any] = {"max_tokens": 11, "n": 2}
    body |= {"return_token_ids": True, "return_draft_counts": True}
    body |= {"messages": [{"role": "user", "content": "ROUND"}]} if chat else {"prompt": "ROUND"}
    body |= {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
    whole, chunks = _both(server, body)
    details: dict[str, Any] = {"accepted_prediction_tokens": 16, "rejected_prediction_tokens": 8}
    details["drafts"] = {"mtp": {"verified": [8, 8, 8], "kept": [8, 8, 0]}}
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
    after = server.metrics()
    between = 'vllm:inter_token_latency_seconds_count{model_name="fake"}'
    assert after[between] - before.get(between, 0) == 12
    wanted = {"generation_tokens_total": 44.0}
    names = {"drafts": 16, "draft_tokens": 48, "accepted_tokens": 32}
    wanted |= {f"spec_decode_num_{name}_total": n for name, n in names.items()}
    for prefix in ("spark:", "vllm:"):
        keys = {f'{prefix}{name}{{model_name="fake"}}': n for name, n in wanted.items()}
        name = prefix + "spec_decode_num_accepted_tokens_per_pos_total"
        for i, n in enumerate((16, 16, 0)):
            source = ',source="mtp"' if prefix == "spark:" else ""
            keys[f'{name}{{model_name="fake",position="{i}"{source}}}'] = n
        for key, more in keys.items():
            assert after[key] - before.get(key, 0) == more, key
    key = 'spark:rounds_total{drafts="3",model_name="fake"}'
    assert after[key] - before.get(key, 0) == 16
    assert after['spark:tokens_per_round{model_name="fake"}'] == 3


@pytest.mark.parametrize("chat", [True, False])
def test_cached_tokens_are_in_every_usage(server: Running, chat: bool) -> None:
    for word in ("WARM", "COLD"):
        body: dict[str, Any] = {"max_tokens": 3, "n": 2}
        body |= {"messages": [{"role": "user", "content": word}]} if chat else {"prompt": word}
        answer, chunks = _both(server, body, continuous_usage_stats=True)
        whole = answer["usage"]
        cached = whole["prompt_tokens"] - 1 if word == "WARM" else 0
        assert whole["prompt_tokens_details"] == {"cached_tokens": cached}
        found = [c["usage"]["prompt_tokens_details"]["cached_tokens"] for c in chunks]
        assert found[-1] == cached and set(found) <= {0, cached}
        counts = [c["usage"]["completion_tokens"] for c in chunks]
        assert counts == sorted(counts) and (counts[0], counts[-1]) == (1, 6)
        assert chunks[-1]["usage"] == whole and chunks[-1]["choices"] == []


def test_models_version_and_health(server: Running) -> None:
    models = server.client.models.list().data
    assert [m.id for m in models] == ["fake", "alias"]
    assert models[0].max_model_len == 512 and models[0].root == "fake"  # type: ignore[attr-defined]
    assert server.client.models.retrieve("alias").id == "alias"
    assert patient.get(server.url + "/health").json() == {"status": "ok"}
    assert patient.get(server.url + "/version").json()["version"]
    assert patient.get(server.url + "/v1/models/none").status_code == 404


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(server: Running, stream: bool) -> None:
    body = {"prompt": "SLOW", "max_tokens": 500, "stream": stream, "n": 3}
    wait(lambda: server.metric("spark:num_requests_running") == 0, "what ran before has ended")
    steps = server.metric(STEPS)
    with httpx.Client(timeout=patient.WAIT_S) as client:
        request = client.build_request("POST", server.url + "/v1/completions", json=body)
        if stream:
            response = client.send(request, stream=True)
            lines = response.iter_lines()  # one that is dropped closes the connection
            next(lines)
            wait(lambda: server.metric("spark:num_requests_running") == 3, "three run")
            response.close()
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(request.url, json=body, timeout=httpx.Timeout(60, read=0.3))
    wait(lambda: server.metric("spark:num_requests_running") == 0, "all have ended")
    assert server.metric(STEPS) - steps < 480, "they ran to their end"  # 500 steps take 10 s
    assert server.metric("spark:free_slots") == fake_engine.SLOTS


LARGE = "a" * 24_000_000
ENORMOUS: list[tuple[str, Any, str]] = [
    (TEXT, {"prompt": ["a"] * 200_000, "n": 512}, "102400000 answers"),
    (TEXT, {"prompt": LARGE}, "prompt is too long: 24000000 bytes"),
    (CHAT, {"messages": [{"role": "user", "content": LARGE}]}, "bytes"),
]


def test_enormous_requests_get_a_message_and_the_server_lives(server: Running) -> None:
    with httpx.Client(base_url=server.url, timeout=patient.WAIT_S) as client:
        for path, body, words in ENORMOUS:
            answer = client.post(path, json=body)
            assert answer.status_code == 400 and words in answer.json()["error"]["message"]
        assert client.post(TEXT, content=b"{").status_code == 400
        assert client.post(TEXT, json={"prompt": "a", "unknown": 1}).status_code == 200
    assert _peak_mb(server.process.pid) < 300


def _peak_mb(pid: int) -> float:
    """What the process ever held in memory, in MB."""
    rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    (peak,) = (row.split()[1] for row in rows if row.startswith("VmHWM"))
    return int(peak) * 1024 / 1e6


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


def test_a_step_that_raises_again_and_again_ends_the_server_with_its_words(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    with _server(tokenizer_folder, grace_s=0.2, restarts=1, dumps=str(tmp_path)) as server:
        others = [_ask_in_thread(server, "SLOW", max_tokens=500) for _ in range(3)]
        wait(lambda: server.metric("spark:num_requests_running") == 3, "three run")
        with pytest.raises(openai.InternalServerError, match="the engine stopped and does not"):
            server.client.completions.create(model="fake", prompt="BOOM")
        wait(lambda: all(others), "every request has an end")
        assert all("the engine stopped" in str(result[0]) for result in others)
        assert server.process.wait(EXIT_S) == 1, "by itself"
    first, second = sorted(tmp_path.iterdir())
    for dump in (first, second):
        assert "RuntimeError: the step went wrong" in dump.read_text()


def test_a_stalled_engine_leaves_with_a_server_that_is_killed(tokenizer_folder: Path) -> None:
    with _server(tokenizer_folder, timeout_s=1.0) as server:
        result = _ask_in_thread(server, "STALL")
        wait(lambda: bool(result), "the request has an end")
        assert getattr(result[0], "status_code", None) == 504
        worker = server.worker
        command = Path(f"/proc/{worker}/cmdline").read_text()
        socket_file = Path(command.rstrip("\0").rpartition("ipc://")[2])
        assert socket_file.exists()
        server.process.kill()
        wait(lambda: not Path(f"/proc/{worker}/cwd").exists(), "the engine left too")
        assert not socket_file.parent.exists()


def test_a_full_disk_takes_words_and_nothing_else(tokenizer_folder: Path) -> None:
    """Neither process can write to its log, and no dump can be written."""
    log = Path("/dev/full")
    with _server(tokenizer_folder, log, dumps="/proc") as server:
        with pytest.raises(openai.InternalServerError, match="the engine stopped"):
            server.client.completions.create(model="fake", prompt="BOOM")
        wait(lambda: _healthy(server.url), "it serves again")
        answer = server.client.completions.create(model="fake", prompt="x", max_tokens=3)
        assert answer.usage is not None and answer.usage.completion_tokens == 3
        server.process.terminate()
        server.process.wait(EXIT_S)


def test_sigterm_drains_and_exits_with_zero(tokenizer_folder: Path) -> None:
    with _server(tokenizer_folder) as server:
        result = _ask_in_thread(server, "SLOW", max_tokens=300)
        wait(lambda: server.metric("spark:num_requests_running") == 1, "it runs")
        server.process.terminate()
        wait(lambda: _get(server.url + "/ready").status_code == 503, "it drains")
        for path, reason in (("/ready", "draining"), ("/health", "draining")):
            answer = _get(server.url + path)
            assert (answer.status_code, reason in answer.text) == (503, True)
        for path in (TEXT, "/tokenize"):
            new = patient.post(server.url + path, json={"prompt": "x", "max_tokens": 2})
            assert new.status_code == 503 and "send the request elsewhere" in new.text
            assert (new.headers["retry-after"], new.headers["connection"]) == ("1", "close")
        assert not result, "the request still runs"
        wait(lambda: bool(result), "the answer has come")
        wait(lambda: _refused(server.url), "no new connections after the last answer")
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
        body: Any = {"prompt": "SLOW", "max_tokens": 500, "stream": True}
        chunks = server.client.completions.create(model="fake", **body)
        next(iter(chunks))
        server.process.terminate()
        reasons = [c.choices[0].finish_reason for c in chunks]
        assert reasons[-1] == "abort" and len(reasons) < 450
        assert server.process.wait(EXIT_S) == 0


def test_few_descriptors_and_many_idle_sockets(tokenizer_folder: Path, tmp_path: Path) -> None:
    log, hard = tmp_path / "log", "ulimit -Sn 40; ulimit -Hn 64"
    with _server(tokenizer_folder, log, hard) as server, ExitStack() as idle:
        rows = Path(f"/proc/{server.process.pid}/limits").read_text().splitlines()
        (row,) = (line for line in rows if line.startswith("Max open files"))
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
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    how: Any = {"stderr": subprocess.PIPE, "input": "", "text": True, "timeout": 60}
    done = subprocess.run(command, cwd=tmp_path, env=env, **how)
    assert "current folder" not in done.stderr
    assert done.returncode in (0, 2), "it ran: no engine, or no parent any more"
