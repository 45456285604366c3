"""Calls to Ray and their order, with a fake Ray that records them."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from spark_engine.errors import CapacityError, OptionError
from spark_engine.runtime import replicas
from spark_engine.runtime.replicas.directory import NOTHING, Directory
from spark_engine.runtime.replicas.plan import ReplicaPlan
from spark_engine.runtime.server.process.options import ServerOptions

NAME = "spark_engine.runtime.replicas.ray_serve"
PLAN = ReplicaPlan("/e", ServerOptions(), 2, 2, 1.0, 1.0, 32.0, ("gpus", "target"), "stamp", True)


class Deployment:
    """A deployment by Ray's rules; without a version it generates one."""

    def __init__(self, **options: Any) -> None:
        self.how = {"version": object(), **options}

    def options(self, **more: Any) -> Deployment:
        return Deployment(**(self.how | more))

    def bind(self, *given: Any) -> Deployment:
        return Deployment(**self.how, given=given)


class Cluster:
    """The used part of Ray. It replaces `replicas` by Ray's rule: if the version or the resources
    differ. `done`: the calls, in order."""

    def __init__(self) -> None:
        self.directory: Directory | None = None
        self.done: list[str] = []
        self.replicas: list[object] = []
        self.as_placed: Any = None
        self.gpus, self.broken = 4.0, ""
        self.applications: dict[str, Any] = {}
        self.stays = 0  # status calls until a deleted application is gone
        self.interrupt = False

    def deployment(self, _: type, **options: Any) -> Deployment:
        return Deployment(**options)

    def start(self, **_: Any) -> None:
        pass

    def run(self, bound: Deployment, name: str, route_prefix: None) -> None:
        how = bound.how
        self.done.append(f"{how['given'][0]} x {how['num_replicas']}")
        if self.interrupt:
            raise KeyboardInterrupt
        as_placed = (how["version"], how["ray_actor_options"])
        count = how["num_replicas"]
        if as_placed != self.as_placed:
            broken = how["given"][0] == self.broken
            self.replicas = self.replicas[1:] if broken else []  # one ends, and no other starts
            if broken:
                raise RuntimeError("it does not load")
            self.as_placed = as_placed
        self.replicas = [*self.replicas, *(object() for _ in range(count))][:count]
        self.applications[name] = None

    def status(self) -> Any:
        if "deleted" in self.done:
            self.stays -= 1
            if self.stays < 0:
                self.applications = {}
        return SimpleNamespace(applications=dict(self.applications))

    def delete(self, name: str, _blocking: bool = True) -> None:
        assert not _blocking, "Ray's limit is a minute, and requests may take longer"
        self.done.append("deleted")

    def shutdown(self) -> None:
        self.done.append("shut down")

    # the directory's actor

    def get_actor(self, name: str, namespace: str) -> Any:
        if self.directory is None:
            raise ValueError("no actor has that name")
        return _Actor(self.directory, self.done)

    def remote(self, **_: Any) -> Callable[[type], Any]:
        def make() -> Any:
            self.directory = self.directory or Directory()
            return _Actor(self.directory, self.done)

        made = SimpleNamespace(remote=make)
        return lambda _: SimpleNamespace(options=lambda **_: made)

    def get(self, found: Any, timeout: float | None = None) -> Any:
        return found

    def kill(self, _: Any) -> None:
        self.directory = None
        self.done.append("killed")

    def cluster_resources(self) -> dict[str, float]:
        return {"GPU": self.gpus, "CPU": 64.0}


class _Actor:
    def __init__(self, directory: Directory, done: list[str]) -> None:
        self._directory, self._done = directory, done

    def __getattr__(self, name: str) -> Any:
        def remote(*given: Any) -> Any:
            if name == "note":
                data = given[0]
                plan = msgspec.json.decode(data, type=ReplicaPlan) if data else None
                self._done.append(f"noted {plan.folder} x {plan.least}" if plan else "noted none")
            return getattr(self._directory, name)(*given)

        return SimpleNamespace(remote=remote)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Replaces Ray by the fake; `ray_serve` is imported again."""
    made = Cluster()
    ray: Any = ModuleType("ray")
    for name in ("get_actor", "remote", "get", "kill", "cluster_resources"):
        setattr(ray, name, getattr(made, name))
    ray.exceptions = SimpleNamespace(RayError=OSError)
    ray.serve = serve = SimpleNamespace(
        **{
            name: getattr(made, name)
            for name in ("deployment", "start", "run", "status", "delete", "shutdown")
        }
    )
    config: Any = ModuleType("ray.serve.config")
    config.AutoscalingConfig = config.AutoscalingPolicy = dict
    for name, module in (("ray", ray), ("ray.serve", serve), ("ray.serve.config", config)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield made
    sys.modules.pop(NAME, None)
    vars(replicas).pop("ray_serve", None)


@pytest.fixture
def placing(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Any:
    found: Any = importlib.import_module(NAME)
    monkeypatch.setattr(found, "HEALTH_S", 0.004)
    monkeypatch.setattr(found, "LEASE_S", 0.01)
    return found


def test_numbers_alone_replace_no_replica(cluster: Cluster, placing: Any) -> None:
    placing.place(PLAN)
    first = list(cluster.replicas)
    placing.change(lambda plan: replace(plan, least=3, most=3))
    assert cluster.replicas[:2] == first and len(cluster.replicas) == 3
    placing.change(lambda plan: replace(plan, least=1, most=1))
    assert cluster.replicas == first[:1]
    placing.change(lambda plan: replace(plan, stamp="rebuilt"))
    assert cluster.replicas[0] is not first[0]


def test_undoing_an_update_keeps_the_old_replicas(cluster: Cluster, placing: Any) -> None:
    placing.place(PLAN)
    first = list(cluster.replicas)
    cluster.broken = "/broken"
    with pytest.raises(CapacityError, match="/e is placed as before"):
        placing.change(lambda plan: replace(plan, folder="/broken"))
    assert cluster.replicas[0] is first[1] and len(cluster.replicas) == 2
    assert placing.placed() == PLAN


def test_what_is_asked_of_ray_is_noted_first(cluster: Cluster, placing: Any) -> None:
    placing.place(PLAN)
    assert cluster.done == ["/e x 2", "noted /e x 2"], "there is nothing to change"
    cluster.done.clear()
    cluster.broken = "/broken"
    with pytest.raises(CapacityError):
        placing.change(lambda plan: replace(plan, folder="/broken"))
    assert cluster.done == ["noted /broken x 2", "/broken x 2", "noted /e x 2", "/e x 2"]
    cluster.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        placing.change(lambda plan: replace(plan, least=3, most=3))
    assert placing.placed().least == 3, "Ray continues with it"


def test_a_plan_that_does_not_fit_changes_nothing(
    cluster: Cluster, placing: Any, caplog: pytest.LogCaptureFixture
) -> None:
    placing.place(PLAN)
    cluster.done.clear()
    with pytest.raises(CapacityError, match="take 5 and there are 4"):
        placing.change(lambda plan: replace(plan, least=5, most=5))
    assert cluster.done == [] and placing.placed() == PLAN
    placing.place(replace(PLAN, known=False))
    assert not caplog.text
    placing.change(lambda plan: replace(plan, least=5, most=5))
    assert "take 5 and there are 4" in caplog.text and "waiting" in caplog.text


def test_readers_create_no_directory(cluster: Cluster, placing: Any) -> None:
    assert placing.named() == ((), True)
    with pytest.raises(OptionError, match="this cluster has no replicas"):
        placing.placed()
    cluster.applications["spark"] = None
    with pytest.raises(OptionError, match="for the first time.*remove"):
        placing.placed()
    assert cluster.directory is None
    placing.place(PLAN)
    assert cluster.directory is not None
    cluster.directory.register("a", "http://a", NOTHING)
    assert placing.named() == ([("a", "http://a")], True)


def test_nothing_stays(cluster: Cluster, placing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    placing.remove()
    assert cluster.done == ["shut down"] and cluster.directory is None
    cluster.done.clear()
    placing.place(PLAN)
    cluster.done.clear()
    cluster.stays = 5  # it drains
    placing.remove()
    assert cluster.done == ["noted none", "deleted", "shut down", "killed"]
    assert cluster.stays < 0, "its requests had time to end"
    cluster.done.clear()
    placing.place(replace(PLAN, server=ServerOptions(drain_timeout_s=0.01)))
    monkeypatch.setattr(placing, "REMOVE_MORE_S", 0.01)
    cluster.done.clear()
    cluster.stays = 10**9  # it never ends
    placing.remove()
    assert cluster.done == ["noted none", "deleted", "shut down", "killed"]


def test_without_ray_the_error_names_the_remedy(
    cluster: Cluster, placing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(**_: Any) -> None:
        raise ConnectionError("no listener")

    monkeypatch.setattr(placing.ray, "init", away, raising=False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    for address, words, token in (
        (None, "does not start on this machine .*no listener.*busy", False),
        ("auto", "not answer at auto .*check that it runs", False),
        ("a:6379", "not answer at a:6379 .*no listener.*check that it runs", True),
    ):
        with pytest.raises(OptionError, match=words) as caught, placing.cluster(address):
            raise AssertionError("there is none")
        assert ("RAY_AUTH_MODE=token" in str(caught.value)) == token


def test_rays_processes_import_nothing_of_the_current_folder(
    cluster: Cluster, placing: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    where: list[str] = []
    monkeypatch.chdir(tmp_path)  # a folder there may have the name of a library
    monkeypatch.setattr(placing.ray, "init", lambda **_: where.append(os.getcwd()), raising=False)
    monkeypatch.setattr(placing.ray, "shutdown", lambda: None, raising=False)
    with placing.cluster(None):
        assert where == ["/"] and os.getcwd() == str(tmp_path)
