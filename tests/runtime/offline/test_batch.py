"""A batch of a scripted engine: every API, every kind of bad line, and kills at any time."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from spark_engine.errors import OptionError
from spark_engine.progress import Progress
from spark_engine.runtime.offline import service_thread
from spark_engine.runtime.offline.batch import run_batch
from spark_engine.runtime.server.process.options import ServerOptions
from tests.repository import PATH
from tests.runtime import fake_engine, small_tokenizer

USER = [{"role": "user", "content": "What is 40 plus 2?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_tokenizer.write(tmp_path_factory.mktemp("engine") / "tokenizer")


def _line(custom_id: str, url: str = "/v1/completions", **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def _answers(path: Path) -> dict[str, Any]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["custom_id"] or row["error"]["message"][:6]: row for row in rows}


def test_each_line_has_one_answer_in_openais_form(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (sys.executable, fake_engine.__file__, "worker", str(folder))
    monkeypatch.setenv("PYTHONPATH", PATH)
    monkeypatch.setattr(service_thread, "prepare", lambda _, options: (command, options))
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        _line("text", prompt=["x", "ECHO"], max_tokens=4, n=2, logprobs=1),
        _line("chat", "/v1/chat/completions", messages=USER, max_tokens=60),
        _line("response", "/v1/responses", input="hi", max_output_tokens=60),
        _line("message", "/v1/messages", messages=USER, max_tokens=60),
        _line("crowd", prompt="x", max_tokens=1, n=260),  # more than may wait next to others
        _line("long", prompt="x " * 4000),
        _line("model", prompt="x", model="gpt-4o"),
        _line("path", "/v1/embeddings", input="x"),
        _line("nan", prompt="NAN"),
        _line("streamed", prompt="x", stream=True),
        "{broken",
    ]
    source.write_text("\n".join(lines) + "\n")
    words = run_batch(source, target, folder.parent, ServerOptions(), Progress(None))
    assert words == "11 answered, 6 with an error"
    found = _answers(target)
    status = {
        name: row["response"] and row["response"]["status_code"] for name, row in found.items()
    }
    assert status == {
        **dict.fromkeys(("text", "chat", "response", "message", "crowd"), 200),
        **{"long": 400, "model": 404, "path": None, "nan": 500, "streamed": None, "line 1": None},
    }
    bodies = {name: row["response"]["body"] for name, row in found.items() if row["response"]}
    assert len(bodies["text"]["choices"]) == 4 and len(bodies["crowd"]["choices"]) == 260
    assert bodies["text"]["choices"][0]["logprobs"]["token_logprobs"] == [-0.5] * 4
    assert bodies["chat"]["choices"][0]["message"]["content"].startswith(fake_engine.ANSWER)
    assert bodies["response"]["output"][-1]["content"][0]["text"].startswith(fake_engine.ANSWER)
    assert bodies["message"]["content"][-1]["text"].startswith(fake_engine.ANSWER)
    assert "too long" in bodies["long"]["error"]["message"]
    assert found["path"]["error"]["code"] == "invalid_url"
    assert "body.stream is on" in found["streamed"]["error"]["message"]
    again = run_batch(source, target, folder.parent, ServerOptions(), Progress(None))
    assert again == "all 11 requests are answered"


def test_files_that_do_not_fit_are_refused_before_any_work(tmp_path: Path) -> None:
    def run(source: Path, target: Path) -> str:
        return run_batch(source, target, tmp_path, ServerOptions(), Progress(None))

    source, target = tmp_path / "in", tmp_path / "out"
    with pytest.raises(OptionError, match="in is not a file; name a file of JSON lines"):
        run(source, target)
    source.write_text(_line("a") + "\n\n" + _line("b") + "\n" + _line("a") + "\n")
    with pytest.raises(OptionError, match="line 4: custom_id 'a' is that of line 1"):
        run(source, target)
    with pytest.raises(OptionError, match="is the file of requests: name another"):
        run(source, source)
    assert not target.exists()
    source.write_text(_line("a"))
    target.write_bytes(fake_answer("other"))
    with pytest.raises(OptionError, match="has 1 answers to requests that .*in does not have"):
        run(source, target)
    assert target.read_bytes() == fake_answer("other")


def fake_answer(custom_id: str) -> bytes:
    from spark_engine.runtime.offline.batch_files import BatchLine

    return BatchLine(1, custom_id).answer({"status_code": 200})


def _start(folder: Path, source: Path, target: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, fake_engine.__file__, "batch", str(folder), f"{source},{target}"]
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": PATH},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def _size(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_a_batch_that_is_killed_twice_loses_and_repeats_nothing(
    folder: Path, tmp_path: Path
) -> None:
    source, target, count = tmp_path / "in", tmp_path / "out", 60
    lines = [_line(f"r{n}", prompt=f"SLOW ECHO {n}", max_tokens=8, seed=n) for n in range(count)]
    source.write_text("\n".join(lines))
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        process, before = _start(folder, source, target), _size(target)
        while _size(target) < before + 8 and process.poll() is None:
            time.sleep(0.002)
        assert process.poll() is None
        process.send_signal(number)
        process.communicate()
        with target.open("r+b") as file:  # as if the last line had been torn, too
            file.truncate(target.stat().st_size - 5)
    left = count - _size(target)
    done, _ = _start(folder, source, target).communicate()
    assert done.startswith(b"%d answered, 0 with an error" % left), "none is answered again"
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert Counter(row["custom_id"] for row in rows) == {f"r{n}": 1 for n in range(count)}
    assert all(row["response"]["body"]["usage"]["completion_tokens"] == 8 for row in rows)
