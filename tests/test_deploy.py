"""The files of docs/deploy: their options exist, their limits fit, systemd takes the unit."""

from __future__ import annotations

import ast
import asyncio
import re
import shutil
import subprocess
import tomllib
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from spark_engine.runtime import config_file, replicas_command
from spark_engine.runtime.options import OF_FILE, OPTIONS
from spark_engine.runtime.replicas.fleet import listed
from spark_engine.runtime.server.api.routes import ROUTES
from spark_engine.runtime.server.connections import MOST_DESCRIPTORS
from spark_engine.runtime.server.keys import read_keys
from spark_engine.runtime.server.server import FORCE_S
from tests.repository import ROOT

FOLDER = ROOT / "docs" / "deploy"
UNIT, DOCKER = FOLDER / "spark-run.service", (FOLDER / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
FLAGS = {row.flag: row for row in OPTIONS} | {"--config": None}
MOST_EXPOSED = 30  # of 100, by `systemd-analyze security`: "OK" ends at 50
systemd = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze here")


class _Unit(ConfigParser):
    def optionxform(self, optionstr: str) -> str:
        return optionstr


@pytest.fixture(scope="module")
def unit() -> ConfigParser:
    found = _Unit(interpolation=None, comment_prefixes="#")
    found.read_string(UNIT.read_text())
    return found


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The unit with a program that exists here."""
    path = tmp_path / UNIT.name
    path.write_text(UNIT.read_text().replace("/opt/spark/bin/spark-run", "/bin/true"))
    return path


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    """The example, read as the command does, with a folder that exists here."""
    text = (FOLDER / "spark-run.toml").read_text()
    assert 'dumps = "/var/lib/spark-run"' in text
    path = tmp_path / "spark-run.toml"
    path.write_text(text.replace("/var/lib/spark-run", str(tmp_path)))
    return config_file.read(path, OF_FILE)


@systemd
def test_systemd_takes_the_unit(installed: Path) -> None:
    command = ["systemd-analyze", "verify", "--man=no", str(installed)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=200)
    own = [line for line in (said.stdout + said.stderr).splitlines() if installed.name in line]
    assert (own, said.returncode) == ([], 0), said.stderr


@systemd
def test_the_unit_may_do_little(installed: Path) -> None:
    limit = f"--threshold={MOST_EXPOSED}"
    command = ["systemd-analyze", "security", "--offline=true", limit, str(installed)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert said.returncode == 0, said.stdout.splitlines()[-1]


def test_the_units_times_and_limits_fit_the_server(
    unit: ConfigParser, config: dict[str, Any]
) -> None:
    service = unit["Service"]
    assert float(service["TimeoutStopSec"]) > config["drain_timeout"] + 2 * FORCE_S
    assert service["KillMode"] == "mixed", "the engine process leaves with its parent"
    assert int(service["LimitNOFILE"]) <= MOST_DESCRIPTORS
    assert service["ExecReload"].endswith("-HUP $MAINPID")
    assert service["RestartPreventExitStatus"] == "2"
    words = service["ExecStart"].split()
    assert words[1:] == ["--config", "/etc/spark/spark-run.toml"]
    assert service["StateDirectory"] == "spark-run"


def test_the_unit_waits_for_the_gpus_devices_where_there_is_a_driver(
    unit: ConfigParser, tmp_path: Path
) -> None:
    script = unit["Service"]["ExecStartPre"].removeprefix("/bin/sh -c '").removesuffix("'")
    driver, device = tmp_path / "driver", tmp_path / "uvm"
    script = script.replace("$$", "$").replace("/proc/driver/nvidia", str(driver))
    script = script.replace("/dev/nvidia-uvm", str(device)).replace("sleep 1", f"touch {device}")
    assert str(driver) in script and str(device) in script and "seq 60" in script
    for there in (False, True):
        if there:
            driver.touch()
        assert subprocess.run(["/bin/sh", "-c", script], timeout=60).returncode == 0
        assert device.exists() is there, "it slept as long as the device was not there"


def test_the_examples_are_read(config: dict[str, Any]) -> None:
    assert {"engine", "serve", "api_keys"} <= config.keys()
    keys = read_keys(FOLDER / "keys.toml")
    assert [key.name for key in keys] == ["agent", "ann"] and keys[0].max_requests == 32


def _known(words: list[str]) -> None:
    for word in words:
        assert not word.startswith("--") or word in FLAGS, word


def test_the_image_is_of_what_there_is() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for given in re.findall(r"EXTRAS=([\w,]+)", DOCKER):
        assert set(given.split(",")) <= extras.keys()
    command = ast.literal_eval(re.search(r"^CMD (\[.*\])", DOCKER, re.M)[1])  # type: ignore[index]
    _known(command)
    check = ast.literal_eval(re.search(r"^  CMD (\[.*\])", DOCKER, re.M)[1])  # type: ignore[index]
    compile(check[2], "HEALTHCHECK", "exec")
    (path,) = re.findall(r"8000(/\w+)", check[2])
    assert any(route.path == path and route.open for route in ROUTES)
    assert DOCKER.index("USER spark") < DOCKER.index("ENTRYPOINT"), "not as root"


def test_what_the_image_leaves_out_is_not_installed() -> None:
    left_out = (FOLDER / "Dockerfile.dockerignore").read_text().split()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["setuptools"]["package-dir"].values()
    assert not {package.partition("/")[0] for package in packages} & set(left_out)


def test_the_composition_is_whole() -> None:
    services, named = COMPOSE["services"], COMPOSE["configs"]
    for name in ("cpu", "cuda"):
        _known(services[name]["command"])
        build = services[name]["build"]
        context = (FOLDER / build["context"]).resolve()
        assert context == ROOT and (context / build["dockerfile"]).is_file()
        assert services[name]["profiles"] == [name]
        grace = float(services[name]["stop_grace_period"].removesuffix("s"))
        assert grace > FLAGS["--drain-timeout"].default + 2 * FORCE_S  # type: ignore[union-attr]
    used = {row["source"] for one in services.values() for row in one.get("configs", ())}
    assert used == named.keys()
    assert (FOLDER / named["board"]["file"]).resolve() == ROOT / "docs" / "grafana.json"
    for row in named.values():
        yaml.safe_load(row.get("content", ""))
    (job,) = yaml.safe_load(named["prometheus"]["content"])["scrape_configs"]
    (alias,) = services["cpu"]["networks"]["default"]["aliases"]
    assert job["static_configs"][0]["targets"] == [f"{alias}:8000"]


def test_kubernetes_runs_what_there_is() -> None:
    rows = [
        row
        for name in ("engines", "front")
        for row in yaml.safe_load_all((FOLDER / "kubernetes" / f"{name}.yaml").read_text())
    ]
    pods = {row["metadata"]["name"]: row["spec"] for row in rows if row["kind"] != "Service"}
    services = {row["metadata"]["name"]: row["spec"] for row in rows if row["kind"] == "Service"}
    for spec in pods.values():
        labels = spec["template"]["metadata"]["labels"]
        assert spec["selector"]["matchLabels"] == labels
        assert labels in [service["selector"] for service in services.values()]
        (container,) = spec["template"]["spec"]["containers"]
        for name, probe in container.items():
            if name.endswith("Probe"):
                path = probe["httpGet"]["path"]
                assert any(route.path == path and route.open for route in ROUTES)
        grace = spec["template"]["spec"]["terminationGracePeriodSeconds"]
        assert grace > FLAGS["--drain-timeout"].default + 2 * FORCE_S  # type: ignore[union-attr]
        mounted = {row["name"] for row in container["volumeMounts"]}
        assert mounted == {row["name"] for row in spec["template"]["spec"]["volumes"]}
    (engine,) = pods["spark-engine"]["template"]["spec"]["containers"]
    _known(engine["args"])
    (front,) = pods["spark-front"]["template"]["spec"]["containers"]
    assert front["command"][:2] == ["spark-replicas", "front"]
    known = {option for row in replicas_command.front.params for option in row.opts}
    assert {word for word in front["command"] if word.startswith("--")} <= known
    assert asyncio.run(_names(front["command"][2])) == [("spark-engines", 8000)]
    assert services["spark-engines"]["clusterIP"] == "None"
    assert pods["spark-engine"]["serviceName"] == "spark-engines"


async def _names(url: str) -> list[tuple[str, int]]:
    """Which names the front would ask for."""
    loop, asked = asyncio.get_running_loop(), []

    async def ask(name: str, port: int, **_: Any) -> list[Any]:
        asked.append((name, port))
        return []

    loop.getaddrinfo = ask  # type: ignore[method-assign, assignment]
    await listed([url])()
    return asked
