"""`spark-bench`: against a scripted server, and one that it starts for an engine folder."""

import json
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("aiohttp", reason="needs the extra `bench`")

from spark_engine.bench import cli, given  # noqa: E402
from spark_engine.bench.clients import Clients, split  # noqa: E402
from spark_engine.bench.load import Load, Script, Turn  # noqa: E402
from spark_engine.bench.lock import alone  # noqa: E402
from spark_engine.bench.target import ask  # noqa: E402
from spark_engine.bench.timings import ClientShare, Server  # noqa: E402
from spark_engine.device.choice import VISIBLE  # noqa: E402
from spark_engine.errors import InternalError, OptionError  # noqa: E402
from spark_engine.hints import extra  # noqa: E402
from tests.bench.scripted_server import Answer, Scripted, event, running, token  # noqa: E402
from tests.runtime import small_engine  # noqa: E402

MODELS = {"/v1/models": {"data": [{"id": "m", "max_model_len": 4096}, {"id": "n"}]}}
FEW = ("--closed", 3, "--requests", 6, "--repeats", 2, "--warm", 2, "--processes", 2)
SHORT = ("--input", "3-5", "--output", 4)


@pytest.fixture(autouse=True)
def _own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that run in parallel do not wait for one another's lock."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture(scope="module")
def server() -> Iterator[Scripted]:
    def post(body: dict[str, Any]) -> Answer:
        if body.get("refuse"):
            return 503, [b"full"]
        count = body["max_tokens"]
        return 200, [*(token("a", i + 1, token_ids=[i]) for i in range(count)), event("[DONE]")]

    with running(Scripted({**MODELS, "/version": {"version": "7"}}, post)) as found:
        yield found


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_engine.build(tmp_path_factory.mktemp("engine"), tokenizer=True)


def _run(*words: object) -> Result:
    return CliRunner().invoke(cli.main, ["serve", *map(str, words)])


def _json(*words: object) -> dict[str, Any]:
    done = _run("--json", *words)
    assert done.exit_code == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_server_is_measured(server: Scripted, tmp_path: Path) -> None:
    server.asked.clear()
    files = ("--out", tmp_path / "r.json", "--plot", tmp_path / "r.html")
    found = _json(server.url + "/v1/", *FEW, *SHORT, *files, "--target", "ttft=60000", "--seed", 5)
    assert [run["requests"] for run in found["runs"]] == [6, 6] and found["seed"] == 5
    assert [run["failed"] for run in found["runs"]] == [0, 0]
    assert found["model"] == "m" and found["server_version"] == "7"
    assert all(run["output_tokens"] == 24 and run["good_share"] == 1 for run in found["runs"])
    assert all(run["client"]["processes"] == 2 for run in found["runs"])
    assert len(server.asked) == 2 + 6 + 6
    prompts = [tuple(body["prompt"]) for body in server.asked]
    assert len(set(prompts)) == len(prompts), "a server could answer a run from what it kept"
    assert all(3 <= len(p) <= 5 and max(p) < 1000 for p in prompts)
    assert json.loads((tmp_path / "r.json").read_text()) == found
    assert "<svg" in (tmp_path / "r.html").read_text()
    assert found["spread"]["output_tok_s"][1] <= found["spread"]["output_tok_s"][2]
    _json(server.url, *FEW, *SHORT, "--seed", 5)
    assert sorted(tuple(body["prompt"]) for body in server.asked[14:]) == sorted(prompts)
    done = _run(server.url, *FEW, *SHORT, "--model", "n", "--body", '{"drafts": 0}')
    assert done.exit_code == 0 and "output tokens/s" in done.stdout, done.stderr
    assert {body["model"] for body in server.asked[28:]} == {"n"}
    assert all(body["drafts"] == 0 for body in server.asked[28:])


def test_an_engine_is_served_and_asked_again_by_a_record(engine: Path, tmp_path: Path) -> None:
    record = {"messages": [{"role": "user", "content": "hi"},
                           {"role": "assistant", "content": "yes", "max_tokens": 3},
                           {"role": "user", "content": "so"},
                           {"role": "assistant", "content": "no", "max_tokens": 3}]}  # fmt: skip
    (tmp_path / "chat.json").write_text(json.dumps(record))
    few = ("--bursts", 2, "--every", 0.1, "--requests", 2, "--repeats", 1, "--warm", 0)
    trace = tmp_path / "trace.json"
    again = ("--replay", tmp_path / "chat.json", "--processes", 1)
    found = _json(engine, *few, *again, "--", "--profile", trace)
    (run,) = found["runs"]
    assert run["requests"] == 4 and run["failed"] == 0 and run["output_tokens"] == 12
    first, second = run["by_turn"]
    assert second["prompt_tokens"] > first["prompt_tokens"] and second["requests"] == 2
    assert found["model"] == "small" and found["load"] == "bursts of 2, every 0.1 s"
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"launch", "send", "to the first token"} <= {row["name"] for row in events}
    texts = _json(engine, *FEW, "--prompts", "text", "--input", 20, "--output", 3, "--repeats", 1)
    assert texts["runs"][0]["failed"] == 0 and 100 < texts["runs"][0]["input_tokens"] < 150


WRONG: list[tuple[tuple[object, ...], str]] = [
    (("--closed", 2, "--rate", 1), "one of --closed, --rate and --bursts"),
    (("--every", 1), "--every does nothing without --bursts"),
    (("--own-answers",), "without --replay"),
    (("--pause", 1), "--pause does nothing without --turns of 2 or more"),
    (("--turn-input", 5), "--turn-input does nothing without --turns"),
    (("--replay", "bench/agent.json", "--tokenizer", "x"), "--tokenizer does nothing with"),
    (("--out", "/none/r.json"), "--out /none/r.json: "),
    (("--plot", "/none/r.html"), "--plot /none/r.html: "),
    (("--target", "ttft=inf"), "--target is 'ttft=inf'"),
    (("--replay", "bench/agent.json", "--input", 5), "--input does nothing with --replay"),
    (("--replay", "/none.json"), "--replay /none.json cannot be read"),
    (("--input", "x"), "--input is 'x'"),
    (("--target", "speed=5"), "--target is 'speed=5'"),
    (("--body", "[]"), "--body is '[]'"),
    (("--body", "{"), "--body is not JSON"),
    (("--prompts", "text"), "--tokenizer"),
    (("--plot", "x.gif"), "must end in .html or .png"),
    (("--model", "x"), "--model is 'x'; "),
    (("--input", 4000, "--output", 97), "may reach 4097 tokens"),
    (("--body", '{"refuse": 1}', *SHORT), "answered none of 8 requests: 503: full"),
    (("--", "--drafts", "0"), "--drafts 0 is for a server that is started here"),
]


@pytest.mark.parametrize(("words", "said"), WRONG, ids=[w[1] for w in WRONG])
def test_a_users_mistake_is_one_line(
    server: Scripted, words: tuple[object, ...], said: str
) -> None:
    done = _run(server.url, *words)
    assert done.exit_code == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert said in last and last.startswith("spark-bench: ") and done.stdout == ""


@pytest.mark.parametrize("option", ["--rate", "--every", "--stagger", "--pause"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_what_is_no_number_is_not_waited_for(option: str, value: str) -> None:
    done = _run("http://127.0.0.1:9", option, value)
    assert done.exit_code == 2 and "is not a finite number" in done.stderr


def test_a_server_that_dies_leaves_the_runs_before_that(tmp_path: Path) -> None:
    asked = []

    def post(body: dict[str, Any]) -> Answer:
        asked.append(body)
        return (200, [token("a", 1), event("[DONE]")]) if len(asked) <= 6 else (500, [b"dead"])

    more = ("--closed", 2, "--requests", 3, "--repeats", 4, "--warm", 0, "--processes", 1)
    with running(Scripted(MODELS, post)) as dying:
        done = _run(dying.url, *more, *SHORT, "--out", tmp_path / "r.json")
    assert done.exit_code == 2 and "answered none of 3 requests: 500: dead" in done.stderr
    found = json.loads((tmp_path / "r.json").read_text())
    assert len(found["runs"]) == 2 and found["repeats"] == 4
    assert "cut off after 2 of 4 runs" in done.stdout and "requests/s" in done.stdout


def test_ctrl_c_leaves_the_runs_before_that(
    server: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, calls = Clients.run, []

    def run(self: Clients, load: Load) -> tuple[float, list[ClientShare]]:
        calls.append(load)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return inner(self, load)

    monkeypatch.setattr(Clients, "run", run)
    once = ("--warm", 0, "--repeats", 3, "--processes", 1)
    done = _run(server.url, *FEW, *SHORT, *once, "--json")
    assert done.exit_code == 130 and len(json.loads(done.stdout)["runs"]) == 1, done.stderr


def test_each_conversation_of_a_record_has_its_own_tools(server: Scripted, tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "assistant", "content": name, "max_tokens": 1}],
         "tools": [{"type": "function", "function": {"name": name}}]}
        for name in ("a", "b")
    ]  # fmt: skip
    (tmp_path / "two.json").write_text(json.dumps(rows))
    server.asked.clear()
    once = ("--requests", 2, "--repeats", 1, "--warm", 0, "--processes", 1)
    _run(server.url, "--replay", tmp_path / "two.json", *once)
    assert {body["tools"][0]["function"]["name"] for body in server.asked} == {"a", "b"}


def test_a_key_is_not_in_the_result() -> None:
    words = ["serve", "x", "--api-key", "secret", "--", "--api-key=secret", "--port", "1"]
    assert "secret" not in " ".join(cli._without_keys(words))
    assert cli._without_keys(words)[-2:] == ["--port", "1"]


def test_the_card_that_the_server_has_is_watched() -> None:
    words: list[list[str]] = [[], ["--device", "2"], ["--device=1"], ["--device"]]
    assert [given.cards_of(w, None, {}) for w in words] == [("0",), ("2",), ("1",), ("0",)]
    environ = {VISIBLE: "5, 7, 9"}
    assert [given.cards_of(w, None, environ) for w in words] == [("5",), ("9",), ("7",), ("5",)]
    assert environ == {VISIBLE: "5, 7, 9"}, "the server chooses for itself"
    with pytest.raises(OptionError, match="--device is 2; CUDA_VISIBLE_DEVICES is '5'"):
        given.cards_of(["--device", "2"], None, {VISIBLE: "5"})


def test_every_card_of_an_engine_of_several_ranks_is_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(given, "read_manifest", lambda path: SimpleNamespace(ranks=2))
    found = [given.cards_of([], Path(), seen) for seen in ({}, {VISIBLE: "3,1,2"})]
    assert found == [("0", "1"), ("3", "1")]
    assert given.cards_of(["--hosts=a,b"], Path(), {}) == ("0",)  # the other is that host's


def test_a_server_that_does_not_answer_is_named(engine: Path, tmp_path: Path) -> None:
    for words, said in (
        (("http://127.0.0.1:9",), "http://127.0.0.1:9/v1/models does not answer"),
        ((tmp_path / "none",), "there is no engine folder"),
        ((engine, "--", "--port", "x"), "the server ended with exit code 2 before it was ready"),
    ):
        done = _run(*words)
        assert done.exit_code == 2 and said in done.stderr.splitlines()[-1], done.stderr
    with running(Scripted({"/v1/models": [1]}, lambda body: (200, []))) as odd:
        assert "does not answer as an OpenAI server" in _run(odd.url).stderr
    with running(Scripted({}, lambda body: (200, []))) as odd:
        assert "answers 404" in _run(odd.url).stderr


@pytest.mark.parametrize(
    "said",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{}",
        *(
            b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
            for body in (b'{"data": [1]}', b'{"data": {"a": 1}}', b'{"data": [{"name": "m"}]}')
        ),
    ],
)
def test_what_listens_there_is_no_such_server(said: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)

        def answer() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(4096)
                peer.sendall(said)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(OptionError, match="/v1/models does not answer as an OpenAI server"):
            ask(f"http://127.0.0.1:{listener.getsockname()[1]}", None, None)
        thread.join()


def test_an_address_that_is_none() -> None:
    with pytest.raises(OptionError, match="does not answer as .* nonnumeric port: 'abc'"):
        ask("http://127.0.0.1:abc", None, None)


def test_a_length_that_is_no_number_is_as_good_as_none() -> None:
    rows = {"/v1/models": {"data": [{"id": "m", "max_model_len": "4096"}]}}
    with running(Scripted(rows, lambda body: (200, []))) as odd:
        assert ask(odd.url, None, None).most is None


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("measure", "clients", "client"):
        monkeypatch.delitem(sys.modules, f"spark_engine.bench.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    done = _run("http://127.0.0.1:9")
    assert done.exit_code == 2 and extra("bench") in done.stderr


def test_another_bench_is_running(server: Scripted, tmp_path: Path) -> None:
    with alone(tmp_path / cli.LOCK, False, print):
        done = _run(server.url)
    assert done.exit_code == 2 and "another spark-bench runs" in done.stderr


def test_processes_share_a_load_and_every_script_is_asked_once(server: Scripted) -> None:
    assert [split(w, 3) for w in (1, 3, 8)] == [[1, 0, 0], [1, 1, 1], [3, 3, 2]]
    scripts = tuple(Script((Turn([i], 2),)) for i in range(40))
    with Clients(Server(server.url, "m"), 3) as clients:
        for width in (2, 6):
            start, shares = clients.run(Load(scripts, width, ""))
            assert len(shares) == min(width, 3)
            numbers = [took.script for share in shares for took in share.took]
            assert sorted(numbers) == list(range(40))
            assert all(took.start >= start for share in shares for took in share.took)
        clients._processes[0].kill()
        clients._processes[0].join()
        with pytest.raises(InternalError, match="a client process ended"):
            clients.run(Load(scripts, 6, ""))
    assert not any(process.is_alive() for process in clients._processes)


def test_the_grid_of_spark_arena(server: Scripted) -> None:
    """Each cell's prompts are behind contexts that were sent before; too deep ones are left out."""
    server.asked.clear()
    words = ("--depth", "0,1000,99999", "--streams", "1,2", "--repeats", 2, "--seed", 3)
    done = CliRunner().invoke(cli.main, ["arena", server.url, "--json", *map(str, words)])
    assert done.exit_code == 0, done.stderr
    cells = json.loads(done.stdout)["cells"]
    assert [(c["depth"], c["streams"]) for c in cells] == [(0, 1), (0, 2), (1000, 1), (1000, 2)]
    assert all(c["prefill_tok_s"] > 0 < c["decode_tok_s"] and c["ttft_ms"] > 0 for c in cells)
    assert all(c["stream_tok_s"] <= c["decode_tok_s"] + 1e-6 for c in cells if c["streams"] == 1)
    asked = [(len(body["prompt"]), body["max_tokens"]) for body in server.asked]
    assert asked[:6] == [(2048, 128)] * 6 and sorted(asked[6:8]) == [(1000, 1), (3048, 128)]
    prompts = [tuple(body["prompt"]) for body in server.asked]
    contexts = {p for p in prompts if len(p) == 1000}
    assert len(contexts) == 6 and contexts == {p[:1000] for p in prompts if len(p) == 3048}
    assert len({p for p in prompts if len(p) > 1000}) == 2 * (1 + 2 + 1 + 2)
    for wrong, said in (
        (("--depth", "99999"), "the server holds 4,096"),
        (("--streams", "0"), "0"),
    ):
        done = CliRunner().invoke(cli.main, ["arena", server.url, *wrong])
        assert done.exit_code == 2 and said in done.stderr
    done = CliRunner().invoke(cli.main, ["arena", server.url, "--depth", "0", "--streams", "1"])
    assert done.exit_code == 0 and "2,048 tokens in, 128 out" in done.stdout
