"""Two servers of the embedded model with one front, under load; one is killed.

Real processes on the CPU, without Ray: `make replicas` tests it.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from spark_engine.runtime.replicas.server_process import ServerProcess
from spark_engine.runtime.server.process.options import ServerOptions
from tests import patient
from tests.repository import ROOT
from tests.soak.attacks.processes import FRONT, How, server
from tests.soak.replicas import CLIENTS, Soak, listener

HOST, REPLICAS, START_S, LOAD_S = "127.0.0.1", 2, 180.0, 150.0


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("engine") / "tiny"
    words = [sys.executable, "-m", "spark_engine.builder.cli", str(ROOT / "models/tiny/checkpoint")]
    words += ["-o", str(found), "--decode", "1,2", "--prefill", "64", "--no-record"]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return found


@contextmanager
def servers(engine: Path) -> Iterator[list[str]]:
    children: list[ServerProcess] = []
    try:
        for _ in range(REPLICAS):
            children.append(ServerProcess(str(engine), ServerOptions(host=HOST, names=("tiny",))))
        for child in children:
            child.wait(START_S)
        yield [child.url for child in children]
    finally:
        for child in children:
            child.stop(5.0)


def rows(url: str) -> list[dict[str, int]]:
    """The front's list of replicas; empty while it does not listen."""
    try:
        found: list[dict[str, int]] = patient.get(f"{url}/replicas").json()["replicas"]
    except httpx.TransportError:
        return []
    return found


async def whole(soak: Soak, count: int) -> None:
    """Waits until so many more requests have ended complete."""
    count += soak.outcomes["whole"]
    async with asyncio.timeout(LOAD_S):
        while soak.outcomes["whole"] < count:
            await asyncio.sleep(0.05)


async def kill_a_busy_one(soak: Soak, processes: dict[str, int]) -> None:
    """Kills a replica that is answering; requests that started before may have been there.

    A stopped process sends nothing: what the front lists of it once its last bytes have arrived
    cannot end before the kill.
    """
    while True:
        for url in [str(row["url"]) for row in rows(soak.url) if row["requests"] > 1]:
            os.kill(processes[url], signal.SIGSTOP)
            await asyncio.sleep(0.2)
            if any(str(row["url"]) == url and row["requests"] > 0 for row in rows(soak.url)):
                os.kill(processes[url], signal.SIGKILL)
                soak.excused_until = time.monotonic()
                return
            os.kill(processes[url], signal.SIGCONT)
        await asyncio.sleep(0.02)


async def trial(soak: Soak, processes: dict[str, int]) -> None:
    async with soak.conversations():
        await whole(soak, 2 * CLIENTS)
        await kill_a_busy_one(soak, processes)
        await whole(soak, 4 * CLIENTS)


def test_of_a_killed_replica_only_what_it_was_answering_is_lost(
    engine: Path, tmp_path: Path
) -> None:
    with servers(engine) as urls, server(tmp_path, How((*urls,), module=FRONT)) as front:
        url, end = front.url, time.monotonic() + START_S
        while sum(row["up"] for row in rows(url)) < len(urls):
            assert time.monotonic() < end
            time.sleep(0.1)
        soak = Soak(tmp_path, REPLICAS)
        soak.url = url
        asyncio.run(trial(soak, {url: listener(url) for url in urls}))
        assert not soak.wrong
        lost = soak.outcomes.pop("error in the stream, excused", 0)
        assert list(soak.outcomes) == ["whole"] and lost <= CLIENTS
        text = patient.get(f"{url}/metrics").text
        retried = 'spark_front_retries_total{why="lost"} '
        (again,) = (row for row in text.splitlines() if row.startswith(retried))
        assert lost + float(again.removeprefix(retried)) >= 1
        end = time.monotonic() + START_S
        while sum(row["up"] for row in rows(url)) != REPLICAS - 1:  # a replica may only be slow
            assert time.monotonic() < end
            time.sleep(0.1)
