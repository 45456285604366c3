"""A server with an engine of two ranks: one is killed or hangs, and the group restarts."""

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.checkpoints import write_checkpoint
from tests.ports import free_port
from tests.runtime import small_tokenizer
from tests.runtime.ranks.test_rank_processes import AT_LENGTH, SERVED, SHALLOW, gone, make
from tests.soak.attacks.processes import SERVER, How, Server, family, runs, server

BODY = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
RANK = "spark_engine.runtime.cli.rank_process"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "c"
    write_checkpoint(folder, SHALLOW, "bf16", moe=True)
    small_tokenizer.write(folder)
    return make(folder, 2, SERVED)


def ask(found: Server, **more: Any) -> httpx.Response:
    return httpx.post(f"{found.url}/v1/completions", json={**BODY, **more}, timeout=90)


def said(found: Server) -> str:
    answer = ask(found)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def until(found: Server, healthy: bool, within_s: float) -> None:
    end = time.monotonic() + within_s
    while found.is_healthy() != healthy:
        assert time.monotonic() < end, found.log.read_text()[-2000:]
        time.sleep(0.02)


def lose_and_come_back(engine: Path, folder: Path, *device: str) -> None:
    """A rank is killed while no request runs, and again in the middle of an answer; `device`:
    options of the second host. `folder`: of the first host's log."""
    hosts = f"127.0.0.1:{free_port()},127.0.0.1"
    command = [sys.executable, "-m", SERVER, str(engine), "--serve", "--tp", "2"]
    other = subprocess.Popen([*command, "--hosts", hosts, "--rank", "1", *device])
    try:
        with server(folder, How((str(engine), "--hosts", hosts))) as found:
            first = said(found)
            for busy in (False, True):
                (rank,) = (pid for pid in family(other.pid)[1:] if runs(pid, RANK))
                subprocess.Popen(["sh", "-c", f"sleep 0.1; kill -KILL {rank}"])
                if busy:
                    with suppress(httpx.HTTPError):
                        ask(found, max_tokens=300)
                until(found, False, 30)
                assert gone([rank])
                until(found, True, 120)
                assert said(found) == first
            left = family(found.pid)
            assert found.stop() == 0 and gone(left)
        other.terminate()
        assert other.wait(60) == 0
    finally:
        other.kill()
        other.wait()


@AT_LENGTH
def test_two_hosts_serve_and_one_comes_back(engine: Path, tmp_path: Path) -> None:
    lose_and_come_back(engine, tmp_path)
