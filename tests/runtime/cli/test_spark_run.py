"""`spark-run` on a real engine of a random checkpoint: one answer, a server, the embedded model."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from click.testing import CliRunner, Result

from spark_engine.errors import EngineError, OptionError
from spark_engine.manifest import FORMAT
from spark_engine.runtime.cli import spark_run as cli
from spark_engine.runtime.cli.spark_run import main
from spark_engine.runtime.offline import embedded
from spark_engine.runtime.server.process import server
from spark_engine.runtime.text.reply_formats import Formats
from spark_engine.runtime.text.reply_parts import Delta, Kind
from spark_engine.runtime.text.tokenizer import Tokenizer
from tests import patient
from tests.ports import served
from tests.runtime import small_engine

# Another process costs seconds on a small machine: only where the test needs one.
RUN = [sys.executable, "-m", "spark_engine.runtime.cli.spark_run"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_engine.build(tmp_path_factory.mktemp("engine"), tokenizer=True)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine of a checkpoint that has no tokenizer."""
    return small_engine.build(tmp_path_factory.mktemp("bare"), tokenizer=False)


def _run(*arguments: object, **how: Any) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments], **how)


def _json(*arguments: object, **how: Any) -> dict[str, Any]:
    done = _run(*arguments, "--json", **how)
    assert done.exit_code == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_json_of_token_ids(bare: Path) -> None:
    ask = (bare, "--prompt-ids", "3,4,5", "--max-tokens", 6, "--temperature", 0)
    got = _json(*ask, "--logprobs", 3)
    assert got["text"] is None
    assert got["finish_reason"] in ("stop", "length")
    count = len(got["token_ids"])
    assert 1 <= count <= 6
    assert len(got["logprobs"]) == count and all(p < 0 for p in got["logprobs"])
    tops = [row[0] for row in got["top_logprobs"]]
    assert [t for t, _ in tops] == got["token_ids"]  # temperature 0 takes the first of the top
    assert [p for _, p in tops] == got["logprobs"]
    usage = {"prompt_tokens": 3, "completion_tokens": count, "total_tokens": 3 + count}
    assert got["usage"] == {**usage, "prompt_tokens_details": {"cached_tokens": 0}}
    assert got["drafts"] is None  # it has no draft head; turning drafts off changes nothing
    assert _json(*ask, "--drafts", 0)["token_ids"] == got["token_ids"]
    assert got["timings"]["total_s"] >= got["timings"]["first_token_s"] > 0


def test_a_seed_repeats_an_answer_and_text_is_the_ids_decoded(engine: Path) -> None:
    ask = (engine, "--prompt", "Once upon a time", "--max-tokens", 12, "--ignore-eos")
    first = _json(*ask, "--seed", 7)
    assert _json(*ask, "--seed", 8)["token_ids"] != first["token_ids"]
    assert first["text"] == Tokenizer.load(engine / "tokenizer").decode(first["token_ids"])
    command = [*RUN, *map(str, ask), "--seed", "7"]
    plain = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert plain.stdout == first["text"] + "\n"
    assert "12 tokens, length" in plain.stderr


def test_a_cut_answer_of_a_schema_is_no_success(engine: Path, tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text('{"type": "object"}')
    schema = ("--json-schema", tmp_path / "s.json")
    done = _run(engine, "--prompt", "a bear", "--max-tokens", 1, *schema)
    assert done.exit_code == 2 and "cut after 1 tokens and is no whole JSON" in done.stderr
    assert done.stdout, "what came is shown"


def test_chat_goes_through_the_template(engine: Path) -> None:
    on = _json(engine, "--chat", "hi", "--max-tokens", 2)
    off = _json(engine, "--chat", "hi", "--max-tokens", 2, "--no-thinking")
    assert off["usage"]["prompt_tokens"] > on["usage"]["prompt_tokens"]
    assert on["content"] == "" and off["reasoning_content"] == ""


WRONG = [
    (("--prompt", "a" * 2000), "length is 256 tokens"),
    (("--prompt", ""), "prompt is empty"),
    (("--prompt-ids", "1,x"), "'1,x'"),
    (("--prompt-ids", "1,512"), "512"),
    (("--prompt-ids", "1", "--temperature", "-1"), "temperature is -1.0"),
    (("--prompt-ids", "1", "--max-tokens", "0"), "max_tokens is 0"),
    (("--prompt-ids", "1", "--json", "--logprobs", "21"), "21"),
    (("--prompt", "a", "--serve"), "only one of"),
    (("--serve", "--top-p", "0.5"), "--top-p does nothing with --serve"),
    (("--serve", "--stop", "x"), "--stop does nothing with --serve"),
    (("--serve", "--json"), "--json does nothing with --serve"),
    (("--chat", "a", "--port", "80"), "--port does nothing without --serve"),
    (("--prompt", "a", "--api-key", "k"), "--api-key does nothing without --serve"),
    (("--prompt", "a", "--no-thinking"), "--no-thinking does nothing with --prompt"),
    (("--prompt", "a", "--logprobs", "3"), "add --json"),
    (("--prompt", "a", "--drafts", "3"), "--drafts is 3; this engine has no draft head"),
    (("--serve", "--drafts", "2"), "--drafts is 2; this engine has no draft head"),
    (("--prompt", "a", "--drafts", "8"), "8 is not in the range 0<=x<=7"),
    (("--prompt", "a", "--system", "b"), "--system does nothing with --prompt; it is for --chat"),
    (("--prompt", "a", "--no-graphs"), "--no-graphs does nothing"),
    (("--prompt", "a", "--device", "0"), "--device does nothing"),
    (("--prompt", "a", "--profile", "/proc/none/t"), "--profile /proc/none/t: No such file"),
    (("--serve", "--profile", "/proc/none/t"), "--profile /proc/none/t: No such file"),
    (("--serve", "--cache-gib", "-1"), "--cache-gib is -1; give GiB from 0"),
    (("--serve", "--cache-gib", "nan"), "--cache-gib is nan"),
    (("--serve", "--cache-gib", "inf"), "--cache-gib is inf"),
    (("--serve", "--cache-gib", "much"), "'much' is not a valid float"),
    (("--serve", "--cache-gib", "1e-9"), "--cache-gib is 9.31e-10; a prefix takes"),
    (("--prompt", "a", "--cache-gib", "1"), "--cache-gib does nothing with --prompt"),
    (("--prompt", "a", "--cache-gib", "0"), "--cache-gib does nothing with --prompt"),
    (("--prompt", "a", "--policy", "latency"), "with --prompt; it is for --serve and --batch"),
    (("--serve", "--policy", "fast"), "'fast' is not one of 'latency', 'balanced', 'throughput'"),
    (("--serve", "--itl-ms", "0"), "--itl-ms 0: give milliseconds above 0"),
    (("--serve", "--itl-ms", "nan"), "--itl-ms nan"),
    (("--serve", "--idle-unload", "nan"), "--idle-unload': nan is not a finite number"),
    (("--serve", "--models-gib", "nan"), "--models-gib': nan is not a finite number"),
    (("--serve", "--request-timeout", "inf"), "--request-timeout': inf is not a finite number"),
    (("--serve", "--models-gib", "1"), "--models-gib does nothing for one engine"),
    ((), "standard input is empty"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG)
def test_a_users_mistake_is_one_line(engine: Path, arguments: tuple[str, ...], words: str) -> None:
    done = _run(engine, *arguments)
    assert done.exit_code == 2
    assert words in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_key_in_the_environment_is_no_mistake(engine: Path) -> None:
    done = _run(engine, "--prompt", "a", "--max-tokens", 1, env={"SPARK_API_KEY": "k"})
    assert done.exit_code == 0, done.stderr


@pytest.mark.parametrize("option", ["--prompt", "--chat"])
def test_a_dash_reads_standard_input(engine: Path, option: str) -> None:
    words = (engine, "--max-tokens", 3, "--temperature", 0, option)
    one, two = _json(*words, "a bear"), _json(*words, "-", input="a bear\n")
    assert one["usage"] == two["usage"] and one["token_ids"] == two["token_ids"]
    done = _run(*words, "-", input=b"\xff")
    assert done.exit_code == 2 and "not UTF-8" in done.stderr


def test_what_is_piped_in_is_a_message(engine: Path) -> None:
    words = (engine, "--max-tokens", 3, "--temperature", 0)
    one, two = _json(*words, "--chat", "a bear"), _json(*words, input="a bear\n")
    assert one["token_ids"] == two["token_ids"] and one["usage"] == two["usage"]
    other = _json(*words, "--system", "b", input="a bear\n")
    assert other["usage"]["prompt_tokens"] > one["usage"]["prompt_tokens"]
    for blank in ("", " \n\n"):
        done = _run(*words, input=blank)
        assert done.exit_code == 2 and "standard input is empty" in done.stderr


def test_a_chat_needs_a_terminal_to_type_and_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {}
    for stdin, stdout in ((True, True), (False, True), (False, False)):
        monkeypatch.setattr(sys.stdin, "isatty", lambda stdin=stdin: stdin)
        monkeypatch.setattr(sys.stdout, "isatty", lambda stdout=stdout: stdout)
        said[stdin, stdout] = cli._default_mode()
    assert said == {(True, True): "terminal", (False, True): "chat", (False, False): "chat"}
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    with pytest.raises(OptionError, match="no terminal to chat on"):
        cli._default_mode()


def test_thought_and_answer_are_distinguished(capsys: pytest.CaptureFixture[str]) -> None:
    show = cli._Show()
    for kind, texts in ((Kind.REASONING, ("So ", "7.")), (Kind.CONTENT, ("3 + 4", " = 7."))):
        for text in texts:
            show([Delta(kind, text)])
    seen = capsys.readouterr()
    assert seen.out == "3 + 4 = 7." and seen.err == "thought: So 7.\nanswer: "
    cli._Show()([Delta(Kind.CONTENT, "7")])
    assert capsys.readouterr() == ("7", "")


@pytest.mark.parametrize("terminal", [False, True])
def test_a_terminal_obeys_no_answer_and_a_file_gets_it_as_it_is(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    cli._Show()([Delta(Kind.CONTENT, "a\x1b]0;title\x07\tb\n")])
    seen = capsys.readouterr().out
    assert seen == ("a␛]0;title␇\tb\n" if terminal else "a\x1b]0;title\x07\tb\n")


def test_loading_says_what_it_does(engine: Path) -> None:
    done = _run(engine, "--prompt", "a", "--max-tokens", 1)
    lines = done.stderr.splitlines()
    assert lines[0].startswith(f"loading {engine}: 0.00 GiB of weights, 3 buckets")
    assert lines[1].startswith("opening 3 buckets")


def test_a_cache_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "site" / "models" / "tiny"
    checkpoint.mkdir(parents=True)
    monkeypatch.setattr(embedded, "find_checkpoint", lambda: checkpoint)
    done = _run("--prompt", "a", env={"XDG_CACHE_HOME": "/proc/none"})
    assert done.exit_code == 2, done.output
    last = done.stderr.splitlines()[-1]
    assert "/proc/none/spark/engines/" in last and "XDG_CACHE_HOME" in last


def test_a_clone_that_cannot_be_written_uses_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "models" / "tiny" / "checkpoint"
    (tmp_path / "engines").mkdir()
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert embedded.engine_folder(checkpoint, tmp_path / "c").is_relative_to(tmp_path / "c")
    for stale in (True, False):  # an engine of another version cannot be built again there
        monkeypatch.setattr(embedded, "is_stale", lambda folder, checkpoint, stale=stale: stale)
        found = embedded.engine_folder(checkpoint, tmp_path / "c")
        assert (found == tmp_path / "engines" / "tiny") is not stale


def test_no_tokenizer_and_no_engine_are_said(bare: Path, tmp_path: Path) -> None:
    for arguments, words in (
        ((bare, "--prompt", "a"), "no tokenizer; give --prompt-ids"),
        ((bare, "--chat", "a"), "no chat template"),
        ((tmp_path / "none", "--prompt", "a"), "there is no engine folder"),
        ((tmp_path / "none", "--serve"), "there is no engine folder"),
        ((bare.parent / "checkpoint", "--serve"), "is a checkpoint, not an engine: build it with"),
    ):
        done = _run(*arguments)
        assert (done.exit_code, words in done.stderr) == (2, True), done.stderr
        assert "Traceback" not in done.stderr


def test_a_taken_port_is_said(engine: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        done = _run(engine, "--serve", "--port", taken.getsockname()[1])
    assert done.exit_code == 2 and "choose another" in done.stderr


def test_a_server_with_a_json_log_writes_nothing_else(engine: Path, tmp_path: Path) -> None:
    with served(str(engine), "--log-format", "json", log=tmp_path / "log"):
        pass
    rows = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    words = [row["message"] for row in rows]
    assert words[0].startswith("loading ") and words[-1] == "stopped"


@pytest.fixture(scope="module")
def url(engine: Path) -> Iterator[str]:
    with served(str(engine), "--served-model-name", "small") as base:
        yield base


def test_the_server_says_what_the_command_says(engine: Path, url: str) -> None:
    ask = ("--prompt", "a bear", "--max-tokens", 9, "--temperature", 0, "--ignore-eos")
    want = _json(engine, *ask)["token_ids"]
    body = {"prompt": "a bear", "max_tokens": 9, "temperature": 0, "ignore_eos": True}
    got = patient.post(url + "/v1/completions", json={**body, "return_token_ids": True}).json()
    assert got["choices"][0]["token_ids"] == want


def test_a_thought_within_its_budget_on_a_real_engine(engine: Path, url: str) -> None:
    """Three tokens, then the engine closes it, whatever the model would generate."""
    tokenizer, thoughts = Tokenizer.load(engine / "tokenizer"), Formats().thoughts
    assert thoughts is not None
    close = tokenizer.encode(thoughts.close)
    client = openai.OpenAI(base_url=url + "/v1", api_key="x", max_retries=0, timeout=300)
    ask: Any = {
        "model": "small",
        "messages": [{"role": "user", "content": "hi"}],
        "seed": 3,
        "max_tokens": 3 + len(close) + 5,
        "extra_body": {"thinking_budget": 3, "return_token_ids": True, "ignore_eos": True},
    }
    choice = client.chat.completions.create(**ask).choices[0]
    ids = choice.token_ids  # type: ignore[attr-defined]
    assert ids[3 : 3 + len(close)] == close and len(ids) == 3 + len(close) + 5
    assert "limited time" in choice.message.reasoning_content  # type: ignore[attr-defined]
    assert tokenizer.decode(ids[3 + len(close) :]).strip("\n") == (choice.message.content or "")


def test_where_the_embedded_engine_belongs(tmp_path: Path) -> None:
    checkpoint = tmp_path / "models" / "tiny" / "checkpoint"
    checkpoint.mkdir(parents=True)
    cached = embedded.engine_folder(checkpoint, tmp_path / "c")
    assert cached == tmp_path / "c" / "spark" / "engines" / version("spark-engine") / "tiny"
    (tmp_path / "engines").mkdir()
    (tmp_path / "pyproject.toml").touch()
    assert embedded.engine_folder(checkpoint, tmp_path / "c") == tmp_path / "engines" / "tiny"


def test_an_embedded_engine_is_built_when_missing_or_older(engine: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(engine.parent / "checkpoint", checkpoint)
    folder = tmp_path / "new" / "tiny"
    assert embedded.is_stale(folder, checkpoint)
    embedded.build(checkpoint, folder)
    assert not embedded.is_stale(folder, checkpoint)
    later = (folder / "manifest.json").stat().st_mtime + 5
    os.utime(checkpoint / "config.json", (later, later))
    assert embedded.is_stale(folder, checkpoint)
    os.utime(folder / "manifest.json", (later + 5, later + 5))
    assert not embedded.is_stale(folder, checkpoint)
    text = (folder / "manifest.json").read_text().replace(f'"format": {FORMAT}', '"format": 1')
    (folder / "manifest.json").write_text(text)
    os.utime(folder / "manifest.json", (later + 5, later + 5))
    assert embedded.is_stale(folder, checkpoint), "of another version's format"
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(EngineError, match="building the embedded model failed"):
        embedded.build(checkpoint, folder)


@pytest.mark.parametrize(
    ("words", "closed"), [((), False), (("--log-format", "json"), True), (("--device", "0"), True)]
)
def test_an_early_process_serves_unless_options_change_what_it_began_with(
    bare: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], closed: bool
) -> None:
    """Its standard error, and the GPU that its driver sees."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(cli, "_check_device", lambda *_: None)
    seen: list[object] = []
    monkeypatch.setattr(server, "run", lambda folder, options, early: seen.append(early) or 0)
    early = SimpleNamespace(close=lambda: seen.append("closed"))
    done = _run(bare, "--serve", *words, obj=early)
    assert done.exit_code == 0, done.output
    assert seen == [*["closed"] * closed, early]
