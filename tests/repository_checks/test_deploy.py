"""The files of docs/deploy: their options exist, their limits fit, systemd takes the unit."""

import ast
import asyncio
import math
import os
import re
import runpy
import shutil
import ssl
import subprocess
import threading
import tomllib
from configparser import ConfigParser
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from spark_engine.errors import OptionError
from spark_engine.runtime.cli import spark_replicas as replicas_command
from spark_engine.runtime.cli.options import config_file
from spark_engine.runtime.cli.options.run_options import OF_FILE, OPTIONS
from spark_engine.runtime.replicas.fleet import listed
from spark_engine.runtime.server.engine_client.ipc import Stats
from spark_engine.runtime.server.http.descriptors import MOST_DESCRIPTORS
from spark_engine.runtime.server.http.routes import ROUTES
from spark_engine.runtime.server.operation.engine_metrics import EngineCollector
from spark_engine.runtime.server.operation.keys import read_keys
from spark_engine.runtime.server.operation.metrics import Metrics, Stopwatch
from spark_engine.runtime.server.process.http_server import FORCE_S
from tests.certificates import OPENSSL, pair
from tests.repository import ROOT
from tests.runtime.server.operation.promql import Panels, Scrape

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
    assert service["OOMPolicy"] == "continue", "the server starts its engine process again"
    documentation = unit["Unit"]["Documentation"].removeprefix("file:/opt/spark/")
    assert (ROOT / documentation).is_file()
    assert "cp -r docs /opt/spark/" in (FOLDER / "README.md").read_text()


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


def test_no_sample_key_is_valid_as_shipped(config: dict[str, Any], tmp_path: Path) -> None:
    assert {"engine", "serve", "api_keys"} <= config.keys()
    shipped = (FOLDER / "keys.toml").read_text()
    assert tomllib.loads(shipped) == {}
    with pytest.raises(OptionError, match=r"it must hold \[\[key\]\]"):
        read_keys(FOLDER / "keys.toml")
    path = tmp_path / "keys.toml"
    path.write_text(re.sub(r"^#(?=\S)", "", shipped, flags=re.M))
    with pytest.raises(OptionError, match="one of our examples"):
        read_keys(path)  # the places for the keys alone are none
    filled = path.read_text().replace('sha256 = "..."', f'sha256 = "{"a1" * 32}"')
    path.write_text(filled.replace('"..."', f'"{"b2" * 16}"'))
    path.chmod(0o600)
    keys = read_keys(path)
    assert [key.name for key in keys] == ["agent", "ann"] and keys[0].max_requests == 32
    for name in ("compose.yaml", "README.md", "spark-run.toml", "kubernetes/engines.yaml"):
        assert "2bb80d53" not in (FOLDER / name).read_text()


@systemd
def test_systemd_takes_the_memory_of_others(tmp_path: Path) -> None:
    own = (FOLDER / "keep-reachable.conf").read_text()
    path = tmp_path / "other.service"
    path.write_text("[Service]\nExecStart=/bin/true\n" + own)
    command = ["systemd-analyze", "verify", "--man=no", str(path)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert (path.name in said.stderr, said.returncode) == (False, 0), said.stderr
    assert "MemoryMin=" in own and "keep-reachable.conf" in (FOLDER / "README.md").read_text()


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
    assert check == ["python", "/opt/spark/healthcheck.py", "8000"]
    assert "COPY docs/deploy/healthcheck.py /opt/spark/healthcheck.py" in DOCKER
    assert DOCKER.index("USER spark") < DOCKER.index("ENTRYPOINT"), "not as root"


def _answers(status: int, context: ssl.SSLContext | None) -> HTTPServer:
    """A server in a thread that answers with the status."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    class Quiet(HTTPServer):
        def handle_error(self, *_: Any) -> None:
            pass  # plain HTTP that comes to TLS

    server = Quiet(("127.0.0.1", 0), Handler)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("status", [200, 503])
def test_the_images_health_check_asks_by_http_and_https(
    tmp_path: Path, status: int, tls: bool
) -> None:
    context = None
    if tls:
        if OPENSSL is None:
            pytest.skip("openssl, which makes certificates")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*pair(tmp_path, "one"))
    server = _answers(status, context)
    check = runpy.run_path(str(FOLDER / "healthcheck.py"))["answer"]
    words = check(server.server_port)
    server.shutdown()
    server.server_close()
    assert words == "" if status == 200 else "status 503" in words
    assert check(server.server_port) != "", "no server listens"


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
    assert (FOLDER / named["board"]["file"]).resolve() == FOLDER / "grafana.json"
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


ALERTS = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]


def _scrape(metrics: Metrics) -> Scrape:
    """As Prometheus stores it: with the labels of the scraped server, and `up`."""
    found = Scrape.of(metrics.render().decode() + "# TYPE up gauge\nup 1\n")
    where = frozenset({("instance", "a:8000"), ("job", "spark-run")})
    samples = {
        name: {labels | where: value for labels, value in rows.items()}
        for name, rows in found.samples.items()
    }
    return Scrape(samples, found.kinds)


def _trouble() -> tuple[Scrape, Scrape]:
    """Before and after everything that the rules are for, but for a server that is gone."""
    state = [Stats(), 0.0]
    metrics = Metrics(EngineCollector("m", lambda: (state[0], state[1]), pid=os.getpid))  # type: ignore[arg-type, return-value]
    metrics.add_routes((route.method, route.path) for route in ROUTES)
    before = _scrape(metrics)
    for status in (200, 500):
        metrics.http("POST", "/v1/completions", status, 1.0)
    metrics.refused()
    for start in (1000.0, 5000.0):
        watch = Stopwatch(metrics)
        watch.start, watch.started = 0.0, start
        watch.end("length")
    metrics.tokens(1, 100.0, first=True)
    state[:] = [Stats(restarts=1, errors=1, preemptions=100), 60.0]
    return before, _scrape(metrics)


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: str(rule["alert"]))
def test_an_alert_fires_for_what_it_names_alone(rule: dict[str, Any]) -> None:
    before, after = _trouble()
    calm, trouble = Panels(before, before, 10.0), Panels(before, after, 10.0)
    assert not {k: v for k, v in calm.compute(rule["expr"]).items() if not math.isnan(v)}
    if rule["alert"] == "SparkServerDown":
        down = frozenset({("instance", "a:8000"), ("job", "spark-run")})
        after.samples["up"] = {down: 0.0}
    if rule["alert"] == "SparkFilesShort":
        (labels,) = after.samples["process_open_fds"]
        after.samples["process_open_fds"] = {labels: after.samples["process_max_fds"][labels]}
    (labels,) = trouble.compute(rule["expr"])
    assert "instance" in dict(labels), "which the summary names"


def test_each_alert_has_a_section_that_says_what_to_do() -> None:
    assert 8 <= len(ALERTS) <= 10
    names = [rule["alert"] for rule in ALERTS]
    text = (ROOT / "docs" / "operate" / "monitoring.md").read_text()
    assert re.findall(r"^### (Spark\w+)$", text, re.M) == names, "in the same order"
    for rule in ALERTS:
        assert rule["labels"]["severity"] in ("critical", "warning")
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert (ROOT / page).is_file() and anchor == rule["alert"].lower()
        assert "{{ $labels.instance }}" in rule["annotations"]["summary"]
    (job,) = yaml.safe_load(COMPOSE["configs"]["prometheus"]["content"])["rule_files"]
    assert job == COMPOSE["configs"]["alerts"]["file"]


def test_the_service_monitor_finds_the_engines() -> None:
    monitor = yaml.safe_load((FOLDER / "servicemonitor.yaml").read_text())
    rows = yaml.safe_load_all((FOLDER / "kubernetes" / "engines.yaml").read_text())
    (service,) = [row for row in rows if row["kind"] == "Service"]
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    assert wanted <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    assert any(route.path == endpoint["path"] for route in ROUTES)
