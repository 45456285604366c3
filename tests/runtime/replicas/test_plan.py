"""The placement plan, the command's refusals, and a replica's process."""

import builtins
import json
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from benchmarks.replicas import measured, simulated
from spark_engine.errors import CapacityError, OptionError
from spark_engine.hints import extra
from spark_engine.runtime.cli.spark_replicas import main
from spark_engine.runtime.replicas.plan import ReplicaPlan, check_resources, counts, wanted
from spark_engine.runtime.replicas.server_process import ServerProcess, free_port
from spark_engine.runtime.server.operation.logs import LogFormat
from spark_engine.runtime.server.process.options import ServerOptions

PLAN = ReplicaPlan(
    "/e", ServerOptions(names=("a",), log_format=LogFormat.JSON), 2, 8, 1.0, 0.5, 10.0
)


def test_a_plan_survives_encoding() -> None:
    found = msgspec.json.decode(msgspec.json.encode(PLAN), type=ReplicaPlan)
    assert found == PLAN and found.version == PLAN.version


def test_what_is_another_replica() -> None:
    assert replace(PLAN, least=3, most=3, gpus=2.0, target=1.0).version == PLAN.version
    other = (
        replace(PLAN, folder="/f"),
        replace(PLAN, stamp="rebuilt"),
        replace(PLAN, server=replace(PLAN.server, names=("b",))),
    )
    assert len({plan.version for plan in (PLAN, *other)}) == 4


@pytest.mark.parametrize(("given", "found"), [("4", (4, 4)), ("2-8", (2, 8)), ("3-3", (3, 3))])
def test_how_many(given: str, found: tuple[int, int]) -> None:
    assert counts(given) == found


@pytest.mark.parametrize("given", ["0", "", "-3", "8-2", "two", "1-2-3", "0-4"])
def test_how_many_must_be_a_number(given: str) -> None:
    with pytest.raises(OptionError, match="like 2-8"):
        counts(given)


def test_the_number_follows_the_requests() -> None:
    asked = (0, 20, 21, 75, 1000)
    assert [wanted(requests, PLAN) for requests in asked] == [2, 2, 3, 8, 8]


def test_too_few_gpus_are_refused_with_numbers() -> None:
    check_resources(PLAN, {"GPU": 2.0, "CPU": 1.0})
    with pytest.raises(CapacityError, match="2 replicas at 1 GPUs each take 2 and there are 1"):
        check_resources(PLAN, {"GPU": 1.0, "CPU": 64.0})
    with pytest.raises(CapacityError, match="--cpus"):
        check_resources(PLAN, {"GPU": 4.0, "CPU": 0.9})


def test_a_server_that_cannot_start_says_so(tmp_path: Path) -> None:
    child = ServerProcess(str(tmp_path / "away"), ServerOptions())
    with pytest.raises(CapacityError, match="the server ended with 2"):
        child.wait(300.0)
    child.stop(0.0)
    with socket.create_server(("127.0.0.1", free_port("127.0.0.1"))) as taken:
        assert free_port("127.0.0.1") != taken.getsockname()[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["front"], "the servers' addresses, or --ray"),
        (["front", "http://a:1", "--ray", "auto"], "the servers' addresses, or --ray"),
        (["front", "ftp://a"], "'ftp://a' is not an address"),
    ],
)
def test_what_the_command_refuses(words: list[str], said: str) -> None:
    found = CliRunner().invoke(main, words)
    assert found.exit_code == 2 and said in found.output


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Any] = builtins.__import__

    def none(name: str, *more: Any, **rest: Any) -> Any:
        if name.partition(".")[0] == "ray":
            raise ModuleNotFoundError("No module named 'ray'", name="ray")
        return real(name, *more, **rest)

    monkeypatch.setattr(builtins, "__import__", none)
    monkeypatch.delitem(sys.modules, "spark_engine.runtime.replicas.ray_serve", raising=False)
    found = CliRunner().invoke(main, ["status"])
    assert found.exit_code == 2 and extra("ray") in found.output


def test_its_options_are_the_servers() -> None:
    text = CliRunner().invoke(main, ["run", "--help"]).output
    for flag in ("--api-keys", "--cache-gib", "--max-queue", "--replicas", "--route-by"):
        assert flag in text
    assert "--prompt" not in text and "--device" not in text


def test_the_number_of_replicas_is_computed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    words = ["--replicas", "1,4", "--agents", "8", "--seconds", "8", "--out", str(out)]
    simulated.main(words)
    rows = {(r["replicas"], r["policy"]): r for r in json.loads(out.read_text())["rows"]}
    assert rows[4, "prefix"]["hit_rate"] > rows[4, "turn"]["hit_rate"] + 0.03
    assert rows[4, "prefix"]["tokens_per_s"] > 3.5 * rows[1, "prefix"]["tokens_per_s"]
    assert capsys.readouterr().out.count("tokens/s") == 6


def test_replicas_that_are_measured_share_no_core() -> None:
    for there, replicas, each in [
        (2, 1, 1),
        (2, 2, 1),
        (32, 4, 2),
        (32, 1, 2),
        (32, 16, 2),
        (5, 2, 2),
    ]:
        found = measured.share(range(there), replicas, each)
        assert found is not None
        taken = [core for own in found.replicas for core in own]
        assert [len(own) for own in found.replicas] == [each] * replicas
        assert sorted([*taken, *found.front]) == list(range(there))
    found = measured.share(range(32), 4, 1)
    assert found is not None and found.replicas == ((0,), (6,), (12,), (18,))
    assert measured.share(range(2), 4, 1) is None
