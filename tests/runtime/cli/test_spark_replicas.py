"""`spark-replicas` in order: the port before the placing, and nothing left where that fails."""

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from spark_engine.errors import CapacityError, OptionError
from spark_engine.manifest import NATIVE
from spark_engine.runtime.cli import spark_replicas as module
from spark_engine.runtime.replicas.plan import ReplicaPlan, moved, sizes
from spark_engine.runtime.server.process.options import ServerOptions


def _manifest(ranks: int = 1, seqs: int = 32, executor: str = NATIVE) -> Any:
    limits = SimpleNamespace(max_seqs=seqs)
    data = f"{ranks} {seqs}".encode()
    given = {"name": "27b", "ranks": ranks, "executor": executor, "limits": limits}
    return SimpleNamespace(**given, encode=lambda: data)


class Placing:
    """What places, without a cluster. `done`: what was asked of it, in order."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.fault: Exception | None = None
        self.taken = False
        self.plan = ReplicaPlan("/old", ServerOptions(), 2, 2, 1.0, 1.0, 32.0, ("gpus", "target"))

    @contextlib.contextmanager
    def cluster(self, address: str | None) -> Iterator[None]:
        self.done.append("cluster")
        yield

    def check_free(self) -> None:
        if self.taken:
            raise OptionError("replicas are placed in this cluster already")

    def place(self, plan: ReplicaPlan) -> None:
        self.done.append(plan)
        if self.fault:
            raise self.fault

    def change(self, edit: Callable[[ReplicaPlan], ReplicaPlan]) -> None:
        self.plan = edit(self.plan)

    def states(self) -> dict[str, int]:
        return {"RUNNING": 2}

    def named(self) -> Any:
        return [], False

    def remove(self) -> None:
        self.done.append("removed")


@pytest.fixture
def placing(monkeypatch: pytest.MonkeyPatch) -> Placing:
    made = Placing()
    real = module._extra

    def extra(name: str, library: str) -> Any:
        return made if name == "ray_serve" else real(name, library)

    monkeypatch.setattr(module, "_extra", extra)
    monkeypatch.setattr(module, "_serve", lambda *_: made.done.append("served") or 0)
    monkeypatch.setattr(module, "read_manifest", lambda _: _manifest(ranks=2, seqs=64))
    monkeypatch.setattr(module, "set_up", lambda *_: None)
    return made


def _run(*words: str) -> Result:
    return CliRunner().invoke(module.main, ["run", "/e", "--port", "0", *words])


def test_replicas_are_placed_served_and_removed(placing: Placing) -> None:
    assert _run("--replicas", "3").exit_code == 0
    first, plan, *others = placing.done
    assert (first, others) == ("cluster", ["served", "removed"])
    assert (plan.least, plan.gpus, plan.target) == (3, 2.0, 64.0)
    assert plan.follows == ("gpus", "target") and plan.known
    _run("--ray", "auto")
    assert not placing.done[5].known, "a cluster may have more machines later"


def test_an_update_does_not_rename_the_model(placing: Placing) -> None:
    _run()
    plan = placing.done[1]
    assert plan.server.names == ("27b",), "requests name it, whatever folder comes next"
    assert moved(plan, "/f", _manifest()).server == plan.server
    _run("--served-model-name", "a", "--served-model-name", "b")
    assert placing.done[5].server.names == ("a", "b")


def test_a_replica_finds_the_keys_from_anywhere(placing: Placing) -> None:
    _run("--api-keys", "keys.toml", "--ray", "auto")
    assert placing.done[1].server.api_keys == str(Path("keys.toml").absolute())


def test_a_port_that_is_taken_is_said_before_anything_is_placed(placing: Placing) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        found = _run("--port", str(taken.getsockname()[1]))
    assert found.exit_code == 2 and "choose another --host or --port" in found.output
    assert placing.done == []


def test_what_a_failed_placement_leaves_is_removed(placing: Placing) -> None:
    placing.fault = CapacityError("the replicas do not start: no")
    found = _run()
    assert (found.exit_code, placing.done[-1]) == (75, "removed") and "served" not in placing.done


def test_a_second_run_in_a_cluster_leaves_the_first_alone(placing: Placing) -> None:
    placing.taken = True
    found = _run("--ray", "auto")
    assert found.exit_code == 2 and "already" in found.output
    assert placing.done == ["cluster"]


def test_an_update_takes_the_gpus_that_the_new_engine_needs(placing: Placing) -> None:
    def change(*words: str) -> None:
        assert CliRunner().invoke(module.main, words).exit_code == 0

    change("update", "/new")
    assert (placing.plan.folder, placing.plan.gpus, placing.plan.target) == ("/new", 2.0, 64.0)
    change("update", "/new", "--gpus", "0.5")
    assert (placing.plan.gpus, placing.plan.follows) == (0.5, ("target",))
    change("update", "/newer")
    assert placing.plan.gpus == 0.5, "a number that was named stays"
    change("scale", "2-5")
    assert (placing.plan.least, placing.plan.most, placing.plan.folder) == (2, 5, "/newer")


def test_what_the_user_names_does_not_follow_the_engine() -> None:
    cpu = _manifest(executor="ort", seqs=8)
    free = {"gpus": 0.0, "target": 8.0, "follows": ("gpus", "target")}
    assert sizes(cpu, gpus=None, target=None) == free
    named = sizes(cpu, gpus=None, target=3.0)
    assert (named["target"], named["follows"]) == (3.0, ("gpus",))
    plan = moved(
        ReplicaPlan("/e", ServerOptions(), 1, 1, cpus=1.0, **named), "/f", _manifest(ranks=4)
    )
    assert (plan.folder, plan.gpus, plan.target, plan.cpus) == ("/f", 4.0, 3.0, 1.0)
    again = moved(plan, "/f", _manifest(ranks=4))
    assert again.version == plan.version, "the same engine"
    assert moved(plan, "/f", _manifest(ranks=4, seqs=8)).version != plan.version, "built again"


def test_nothing_listens_before_the_replicas_are_there() -> None:
    serving = module._extra("front_process", "aiohttp")
    listener = serving.listen(ServerOptions(host="127.0.0.1", port=0))
    with contextlib.closing(listener), socket.socket() as client:
        assert client.connect_ex(listener.getsockname()) != 0
