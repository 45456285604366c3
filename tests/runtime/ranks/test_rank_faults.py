"""Ranks that are killed or stopped at known steps of a server with drafts, prefix cache, swap and
grammars: the clients' answers, leaked resources, and the restart of the group.

The real engine process and its ranks; the HTTP application without a socket.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from spark_engine.runtime.engine.engine import EngineOptions
from spark_engine.runtime.server.engine_client import supervisor as module
from spark_engine.runtime.server.engine_client.client import EngineClient, EngineDied
from spark_engine.runtime.server.engine_client.supervisor import Supervision
from spark_engine.runtime.server.http.app import create_app
from spark_engine.runtime.server.http.endpoints import Endpoints
from spark_engine.runtime.server.prompts.text_files import read_text
from spark_engine.runtime.server.service.service import Service
from tests.checkpoints import write_checkpoint
from tests.repository import PATH
from tests.runtime import small_tokenizer
from tests.runtime.fake_client import inline
from tests.runtime.ranks import faulty_ranks
from tests.runtime.ranks.faulty_ranks import LIMIT_S, OPENING, SERVING, Done, Fault, Faults
from tests.runtime.ranks.test_rank_processes import (
    AT_LENGTH,
    BLOCKS,
    QUARTERS,
    SERVED,
    SHALLOW,
    free_port,
    gone,
    make,
)

KILL, STOP = int(signal.SIGKILL), int(signal.SIGSTOP)
DRAFTING = replace(SERVED, drafts=2, verify=((2, 2), (4, 2)), max_seqs=4, kv_tokens=384)
RED_S = 5.0  # until /health shows a failed rank: 0.03 to 0.19 on an idle machine
BACK_S = 300.0  # the same for a restart, which takes 2 s
STEM = [i * 7 % 200 + 1 for i in range(70)]


def body(n: int) -> dict[str, Any]:
    """One of a few requests with a common beginning; two of them fill the pages, and every second
    one has a regex."""
    prompt = [*STEM, *[n] * (30 + n)]
    found = {"prompt": prompt, "max_tokens": 80, "temperature": 0, "ignore_eos": n % 2 == 1}
    return found if n % 2 else found | {"guided_regex": "(yes|no) [0-9]{3}-[a-c]+x"}


BODIES = [body(n) for n in range(6)]


class Running:
    """A server over an engine with faults. `others`: processes that run next to it."""

    def __init__(self, folder: Path, engine: Path, options: EngineOptions) -> None:
        self.engine, self.faults = engine, Faults(folder)
        given = msgspec.json.encode(options).decode()
        command = (sys.executable, "-P", faulty_ranks.__file__, str(folder), str(engine), given)
        how = Supervision(watchdog_s=60, restarts=100, wait_s=BACK_S, dumps=folder)
        self.client = EngineClient(command, 100, how)
        self.http: httpx.AsyncClient

    async def ask(self, given: dict[str, Any]) -> httpx.Response:
        return await self.http.post("/v1/completions", json=given)

    async def say(self, given: dict[str, Any]) -> str:
        answer = await self.ask(given)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    async def health(self) -> str | None:
        answer = await self.http.get("/health")
        assert (answer.status_code == 200) == ("reason" not in answer.json())
        return None if answer.status_code == 200 else str(answer.json()["reason"])

    async def until(self, ok: Callable[[], object], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not ok():
            assert time.monotonic() < end
            await asyncio.sleep(0.01)

    def processes(self) -> list[int]:
        """All processes over the engine's folder: rank 0, the other ranks, and those that restart
        ranks."""
        return processes(self.engine)


def processes(engine: Path) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        if str(engine).encode() in words and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return found


def run(
    folder: Path, engine: Path, use: Callable[[Running], Awaitable[None]], hosts: str | None = None
) -> None:
    """Starts a server and uses it; all resources are freed afterwards."""

    async def served() -> None:
        options = EngineOptions(drafts=2, fixed_drafts=True, hosts=hosts, swap_bytes=1 << 30)
        running = Running(folder, engine, options)
        try:
            info = await running.client.start()
            tokenizer, template = read_text(engine)
            pool = inline(running.client, info, tokenizer, template)
            service = Service(running.client, info, tokenizer, pool, ["fake"])
            transport = httpx.ASGITransport(create_app(Endpoints(service)))
            async with httpx.AsyncClient(
                transport=transport, base_url="http://x", timeout=None
            ) as running.http:
                await use(running)
        finally:
            await running.client.close()

    asyncio.run(served())


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.2)
    monkeypatch.setattr(module, "LONGEST_PAUSE_S", 0.2)
    monkeypatch.setenv("PYTHONPATH", PATH)


def held() -> list[str]:
    """Descriptors and children that a group could leak into this process."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(path).split(":")[0])
        except OSError:
            continue
    return sorted(found)


async def suffer(server: Running, faults: list[Fault], alone: list[str]) -> list[int]:
    """Faults while all requests run, and the server's guarantees; the statuses of the answers."""
    before, known = len(server.faults.done()), server.processes()
    folder = server.client._process._folder  # type: ignore[union-attr]
    server.faults.order(faults)
    uncached = BODIES[1] | {"cache_salt": str(before + 1)}  # else each would start from the cache
    streams = [one | {"stream": n % 3 == 1} for n, one in enumerate([*BODIES, uncached])]
    answered = asyncio.gather(*map(server.ask, streams))
    await server.until(lambda: answered.done() or len(server.faults.done()) > before, BACK_S)
    assert len(server.faults.done()) > before, f"no request was at {faults[0]}"
    first = server.faults.done()[before]
    reason = await red(server, first)
    assert named(reason, first.fault), (reason, faults)
    await server.until(lambda: len(server.faults.done()) == before + len(faults), BACK_S)
    statuses = []
    for answer, text in zip(await answered, [*alone, alone[1]], strict=True):
        said, error = outcome(answer)
        statuses.append(500 if error else answer.status_code)
        if error is None:
            assert said == text
            continue
        assert text.startswith(said) and error["code"] == "engine_error", error
        assert "the engine stopped" in error["message"], "which rank it was is in the log"
    end = time.monotonic() + BACK_S
    while await server.health() is not None:
        assert time.monotonic() < end
        await asyncio.sleep(0.05)
    lost = {pid for done in server.faults.done()[before:] for pid in done.pids}
    host_pids = {pid for fault in faults for pid in fault.hosts.values()}
    assert gone((lost | set(known)) - host_pids), "of earlier groups"
    assert len(server.processes()) == len(known)
    assert not folder.exists()
    assert [await server.say(one) for one in BODIES[:3]] == alone[:3]
    return statuses


def outcome(answer: httpx.Response) -> tuple[str, dict[str, Any] | None]:
    """Text and error of an answer, streamed or not."""
    if answer.status_code != 200:
        assert answer.status_code == 500, answer.text
        return "", answer.json()["error"]
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.json()["choices"][0]["text"], None
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    rows = [json.loads(line) for line in lines if line != "[DONE]"]
    text = "".join(row["choices"][0]["text"] for row in rows if row.get("choices"))
    return text, next((row["error"] for row in rows if "error" in row), None)


async def red(server: Running, done: Done) -> str:
    """The error in /health and in the log, at the time of the fault."""
    limit = RED_S + (LIMIT_S if done.fault.signal == STOP else 0)
    while (reason := await server.health()) is None:
        assert time.monotonic() - done.at < limit, done
        await asyncio.sleep(0.01)
    print(f"red after {time.monotonic() - done.at:.2f} s: {done.fault} {reason}")
    return f"{reason}; {server.client.reason}"


def named(words: str, fault: Fault) -> bool:
    """Whether the message describes the fault and names the rank."""
    if 0 in fault.ranks:
        return "the engine process ended with code -9" in words
    said = "is gone" if fault.signal == KILL else "did not reach"
    return any(f"rank {rank} {said}" in words for rank in fault.ranks) or (
        len(fault.ranks) > 1 and f"{said}" in words and "rank" in words
    )


def trial(
    folder: Path, engine: Path, plan: list[list[Fault]], hosts: str | None = None
) -> list[list[int]]:
    """The statuses of the answers for every row of the plan, on one server."""
    statuses = []

    async def use(server: Running) -> None:
        alone = [await server.say(one) for one in BODIES]
        await asyncio.gather(*map(server.ask, BODIES))  # allocate what is kept
        before = held()
        for faults in plan:
            statuses.append(await suffer(server, faults, alone))
        assert held() == before
        stats = server.client.stats
        assert stats.restarts == sum(map(len, plan))

    run(folder, engine, use, hosts)
    return statuses


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair") / "c"
    write_checkpoint(folder, {**SHALLOW, "mtp_num_hidden_layers": 1}, "f32")
    small_tokenizer.write(folder)
    return make(folder, 2, DRAFTING)


def test_a_rank_that_is_killed_in_a_round_and_again_in_the_start_after_it(
    pair: Path, tmp_path: Path
) -> None:
    faults = [Fault("round", (1,), KILL, 5), Fault("opening", (1,), KILL)]
    [statuses] = trial(tmp_path, pair, [faults])
    assert 500 in statuses
    assert gone(processes(pair))


def plan(seed: int, ranks: int, stops: bool = True, **more: Any) -> list[list[Fault]]:
    """A fault at every point of a serving group, each of some ranks at once; then one fault, and
    during the restart another one at every point of a start."""
    rng, rows = random.Random(seed), []
    for point in rng.sample(SERVING, len(SERVING)):
        kind = rng.choice((KILL, KILL, STOP)) if stops else KILL
        count = rng.randint(1, {"round": 8, "sum": 200}.get(point, 1))
        which = some(rng, ranks, kind == KILL)
        rows.append([Fault(point, which, kind, count, rng.random() < 0.7, **more)])
    for point in rng.sample(OPENING, len(OPENING)):
        first = Fault("round", some(rng, ranks), KILL, rng.randint(1, 8), **more)
        again = Fault(point, some(rng, ranks), KILL, 1, rng.random() < 0.5, **more)
        rows.append([first, again])
    return rows


def some(rng: random.Random, ranks: int, first: bool = True) -> tuple[int, ...]:
    """A random choice of them; rank 0 in one of three, if allowed."""
    least = int(not first or rng.random() < 2 / 3)
    return tuple(sorted(rng.sample(range(least, ranks), rng.randint(1, ranks - least))))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("four") / "c"
    changes = {**SHALLOW, **BLOCKS, **QUARTERS, "mtp_num_hidden_layers": 1}
    write_checkpoint(folder, changes, "f32")
    small_tokenizer.write(folder)
    return make(folder, 4, DRAFTING)


@AT_LENGTH
@pytest.mark.parametrize("seed", range(2))
def test_any_of_four_at_any_step(seed: int, four: Path, tmp_path: Path) -> None:
    statuses = trial(tmp_path, four, plan(seed, 4))
    assert {500, 200} <= {status for row in statuses for status in row}
    assert gone(processes(four))


@AT_LENGTH
@pytest.mark.parametrize("point", OPENING)
def test_a_first_start_that_loses_a_rank_says_so_and_leaves_nothing(
    point: str, four: Path, tmp_path: Path
) -> None:
    Faults(tmp_path).order([Fault(point, (1, 3), KILL, after=False)])

    async def use(server: Running) -> None:
        raise AssertionError("it serves")

    before = held()
    with pytest.raises(EngineDied, match="rank [13] is gone"):
        run(tmp_path, four, use)
    assert gone(processes(four))
    assert held() == before


@AT_LENGTH
def test_a_server_that_is_closed_while_ranks_are_stopped_leaves_nothing(
    four: Path, tmp_path: Path
) -> None:
    async def use(server: Running) -> None:
        Faults(tmp_path).order([Fault("sum", (1, 3), STOP, 20)])
        asked = asyncio.create_task(server.ask(BODIES[1]))
        await server.until(server.faults.done, BACK_S)
        closing_from.append(time.monotonic())
        asked.cancel()

    closing_from: list[float] = []
    before = held()
    run(tmp_path, four, use)
    assert gone(processes(four))
    assert time.monotonic() - closing_from[0] < LIMIT_S
    assert held() == before


SERVE_RANK = """
import sys
from pathlib import Path
from spark_engine.runtime.ranks import hosts
folder, names, rank, still_s = sys.argv[1:]
hosts.STILL_S = float(still_s)
sys.exit(hosts.serve_rank(Path(folder), names.split(","), int(rank), print))
"""


@contextmanager
def serving_rank(engine: Path, hosts: str, rank: int = 1) -> Iterator[int]:
    """Another host; rank 0 sees first that its rank has stopped."""
    given = [str(engine), hosts, str(rank), str(LIMIT_S + 2)]
    process = subprocess.Popen([sys.executable, "-c", SERVE_RANK, *given])
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait(10)


@AT_LENGTH
@pytest.mark.parametrize("ranks", [2, 4])
def test_peers_on_other_hosts_are_lost_at_any_step(
    ranks: int, pair: Path, four: Path, tmp_path: Path
) -> None:
    names, engine = ",".join(["127.0.0.1"] * (ranks - 1)), pair if ranks == 2 else four
    names = f"127.0.0.1:{free_port()},{names}"
    with ExitStack() as others:
        hosts = {
            rank: others.enter_context(serving_rank(engine, names, rank))
            for rank in range(1, ranks)
        }
        hung = [Fault("round", (ranks - 1,), STOP, 3, hosts=hosts)]
        rows = [hung, *plan(ranks, ranks, stops=False, hosts=hosts)]
        statuses = trial(tmp_path, engine, rows, names)
        assert {500, 200} <= {status for row in statuses for status in row}
    assert gone(processes(engine))


@AT_LENGTH
def test_a_host_is_lost_and_another_takes_its_place(pair: Path, tmp_path: Path) -> None:
    hosts = f"127.0.0.1:{free_port()},127.0.0.1"

    async def use(server: Running) -> None:
        first = await server.say(BODIES[0])
        (lost,) = set(server.processes()) - {server.client.pid, host}
        os.kill(host, KILL)
        done = Done(Fault("", (1,), KILL), time.monotonic(), [lost])
        assert "rank 1 is gone" in await red(server, done)
        assert gone([lost])
        with serving_rank(pair, hosts):
            assert await server.say(BODIES[0]) == first, "it waited for the other host"
            assert await server.health() is None

    with serving_rank(pair, hosts) as host:
        run(tmp_path, pair, use, hosts)
    assert gone(processes(pair))
