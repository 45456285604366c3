"""A server with an engine of two ranks: one is killed or hangs, and the group restarts."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest

from tests.checkpoints import write_checkpoint
from tests.ports import free_port
from tests.runtime import small_tokenizer
from tests.runtime.ranks.test_rank_processes import AT_LENGTH, SERVED, SHALLOW, gone, make

BODY = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "c"
    write_checkpoint(folder, SHALLOW, "bf16", moe=True)
    small_tokenizer.write(folder)
    return make(folder, 2, SERVED)


class Server:
    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process, self.at = process, f"http://127.0.0.1:{port}"

    def ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
        data = None if body is None else json.dumps(body).encode()
        asked = Request(self.at + path, data, {"Content-Type": "application/json"})
        try:
            with urlopen(asked, timeout=90) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode()
        except (URLError, ConnectionError) as error:
            return 0, str(error)

    def until(self, status: int, within_s: float) -> float:
        """Seconds until /health has this status."""
        start = time.monotonic()
        while self.ask("/health")[0] != status:
            assert time.monotonic() - start < within_s, self.ask("/health")
            time.sleep(0.02)
        return time.monotonic() - start

    def others(self) -> list[int]:
        found = []
        for child in _children(self.process.pid):
            found += [pid for pid in (child, *_children(child)) if _is_rank(pid)]
        return found


def _children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def _is_rank(pid: int) -> bool:
    try:
        return b"rank_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@contextmanager
def served(engine: Path, *options: str) -> Iterator[Server]:
    port = free_port()
    module = "spark_engine.runtime.cli.spark_run"
    command = [sys.executable, "-m", module, str(engine), "--serve", "--port", str(port)]
    process = subprocess.Popen([*command, *options], stdin=subprocess.DEVNULL, text=True)
    server = Server(process, port)
    try:
        server.until(200, 120)
        yield server
    finally:
        others = server.others()
        process.terminate()
        assert process.wait(60) == 0
        assert gone(others)


def said(server: Server) -> str:
    status, text = server.ask("/v1/completions", BODY)
    assert status == 200, text
    return str(json.loads(text)["choices"][0]["text"])


def lose_and_come_back(engine: Path, *device: str) -> None:
    """A rank is killed while no request runs, and again in the middle of an answer; `device`:
    options of the second host."""
    hosts = f"127.0.0.1:{free_port()},127.0.0.1"
    module = "spark_engine.runtime.cli.spark_run"
    command = [sys.executable, "-m", module, str(engine), "--serve", "--tp", "2"]
    other = subprocess.Popen([*command, "--hosts", hosts, "--rank", "1", *device])
    try:
        with served(engine, "--hosts", hosts) as server:
            first = said(server)
            for busy in (False, True):
                (rank,) = [pid for pid in _children(other.pid) if _is_rank(pid)]
                subprocess.Popen(["sh", "-c", f"sleep 0.1; kill -KILL {rank}"])
                if busy:
                    server.ask("/v1/completions", {**BODY, "max_tokens": 300})
                server.until(503, 30)
                assert gone([rank])
                server.until(200, 120)
                assert said(server) == first
        other.terminate()
        assert other.wait(60) == 0
    finally:
        other.kill()
        other.wait()


@AT_LENGTH
def test_two_hosts_serve_and_one_comes_back(engine: Path) -> None:
    lose_and_come_back(engine)
