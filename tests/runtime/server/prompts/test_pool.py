"""Work on a request's text in processes with limits: what is ended, what is retried, the order of
owners, and that no short job waits for another owner's long one."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from spark_engine.errors import EngineError
from spark_engine.runtime.server.engine_client.client import Busy
from spark_engine.runtime.server.prompts import contract, limits, processes
from spark_engine.runtime.server.prompts.pool import WorkerPool
from spark_engine.runtime.structured.fields import StructuredFields
from tests.patient import until, wait
from tests.runtime.server.prompts import served_folder
from tests.runtime.server.prompts.served_folder import LOOP, MEMORY

HANGS_S = 60.0
Run = Callable[[Coroutine[Any, Any, Any]], Any]
pytestmark = pytest.mark.usefixtures("run")  # of the tests that are coroutines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served_folder.write(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[tuple[Run, WorkerPool]]:
    with served_folder.running(folder) as (runner, pool):
        yield lambda work: runner.run(asyncio.wait_for(work, HANGS_S)), pool


@pytest.fixture(autouse=True)
def run(served: tuple[Run, WorkerPool]) -> Run:
    return served[0]


@pytest.fixture
def pool(served: tuple[Run, WorkerPool], monkeypatch: pytest.MonkeyPatch) -> WorkerPool:
    monkeypatch.setattr(limits, "LOOK_S", 0.1)
    for lane in served[1].lanes:
        base, more, most = lane.cpu_s
        monkeypatch.setattr(lane, "cpu_s", (min(base, 0.3), more, min(most, 0.3)))
    return served[1]


async def _ask(pool: WorkerPool, said: str = "hi", owner: str = "", size: int = 0) -> Any:
    return (await pool.run(contract.JobKind.CHAT, served_folder.body(said, size), owner))[0]


async def _cancelled(jobs: list[asyncio.Future[Any]]) -> None:
    for job in jobs:
        job.cancel()
    await asyncio.gather(*jobs, return_exceptions=True)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _lane(pool: WorkerPool, name: str) -> Any:
    return next(lane for lane in pool.lanes if lane.name == name)


@pytest.mark.parametrize("size", [0, limits.SMALL_BODY])
async def test_a_template_without_an_end_is_ended(pool: WorkerPool, size: int) -> None:
    with pytest.raises(
        contract.TooCostly, match="reading the request took more than 0.3 s of CPU time"
    ):
        await _ask(pool, LOOP, size=size)
    assert isinstance(await _ask(pool), contract.Prepared)


async def test_memory_has_a_bound(pool: WorkerPool) -> None:
    found = await _ask(pool, MEMORY)
    assert isinstance(found, contract.BodyRefused), found
    assert "reading the request took more than 1024 MiB of memory" in found.message
    assert isinstance(await _ask(pool), contract.Prepared)


async def test_short_prompts_do_not_wait_for_long_ones(pool: WorkerPool) -> None:
    long = [asyncio.ensure_future(_ask(pool, LOOP, f"bad {i}")) for i in range(4)]
    await until(lambda: bool(_lane(pool, "long prompts").walls))
    assert isinstance(await _ask(pool, owner="good"), contract.Prepared)
    assert not all(task.done() for task in long)
    await _cancelled(long)


async def test_prompts_do_not_wait_for_grammars(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("grammars", 0.02), ("slow grammars", 0.05)):
        monkeypatch.setattr(_lane(pool, name), "cpu_s", (seconds, 0.0, seconds))
    rows = {f"p{i}": {"type": "string", "maxLength": 500 + i} for i in range(2000)}
    many = {"type": "object", "properties": rows, "required": list(rows)}
    form = contract.FormAsked(StructuredFields(guided_json=many), [], None, False, True)
    forms = [
        asyncio.ensure_future(
            pool.run(contract.JobKind.FORM, [[contract.encode(form)]], f"bad {i}")
        )
        for i in range(6)
    ]
    await until(lambda: bool(_lane(pool, "slow grammars").walls))
    assert isinstance(await _ask(pool, owner="good"), contract.Prepared)
    assert not any(task.done() for task in forms[-2:])
    found = await asyncio.gather(*forms, return_exceptions=True)
    assert all(isinstance(one, contract.TooCostly) for one in found), found


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGKILL, "its process ended (-9)"), (signal.SIGSTOP, "was stopped from outside")],
)
def test_a_worker_that_falls_loses_no_request(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
    words: str,
    busy: bool,
) -> None:
    """One that waits gets no job; one that has a job leaves it to another, and the log says why."""
    monkeypatch.setattr(limits, "LOOK_S", 0.1)
    first: set[Any] = set()  # those that fall
    asked: set[Any] = set()
    ask = processes.WorkerProcess.ask

    async def noted(self: Any, header: bytes, blobs: Any) -> Any:
        asked.add(self)
        if busy and self in first:
            os.kill(self.pid, number)
        return await ask(self, header, blobs)

    async def work(pool: WorkerPool) -> list[Any]:
        await until(lambda: len(pool.workers) == sum(lane.workers for lane in pool.lanes))
        first.update(pool.workers)
        if not busy:
            for worker in first:
                os.kill(worker.pid, number)
            await until(lambda: all(worker.has_left() or worker.is_stopped() for worker in first))
        return await asyncio.gather(*(_ask(pool) for _ in range(4)), _ask(pool, size=1 << 17))

    monkeypatch.setattr(processes.WorkerProcess, "ask", noted)
    with served_folder.running(folder) as (runner, pool):
        found = runner.run(asyncio.wait_for(work(pool), HANGS_S))
        fell = first - pool.workers
    assert all(isinstance(one, contract.Prepared) for one in found)
    assert len(fell) >= limits.QUICK_WORKERS + 1, "those of both lanes that were to take a job"
    assert first & asked == (fell if busy else set())
    assert caplog.text.count(words) == len(first & asked)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_forking_process_that_falls_comes_again(
    pool: WorkerPool, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark_engine.runtime.server.prompts.processes.HELLO_S", 0.5)
    count = sum(lane.workers for lane in pool.lanes)  # one that comes later would answer
    await until(lambda: len(pool.workers) == count and pool._forker is not None)
    assert pool._forker is not None
    first = pool._forker.pid
    os.kill(first, number)
    for worker in list(pool.workers):
        _signal(worker.pid, signal.SIGKILL)
    assert isinstance(await _ask(pool), contract.Prepared)
    assert pool._forker is not None and pool._forker.pid != first
    assert pool.unhealthy_reason() is None


async def test_a_job_that_fells_its_workers_is_refused(pool: WorkerPool) -> None:
    asking = asyncio.ensure_future(_ask(pool, LOOP, size=limits.SMALL_BODY))
    lane = _lane(pool, "long prompts")
    while not asking.done():
        if lane.walls:
            for worker in list(pool.workers):
                _signal(worker.pid, signal.SIGKILL)
        await asyncio.sleep(0.05)
    with pytest.raises(Busy, match="failed 3 times: its process ended"):
        await asking


async def test_a_client_that_leaves_cancels_its_job(pool: WorkerPool) -> None:
    lane = _lane(pool, "long prompts")
    jobs = [asyncio.ensure_future(_ask(pool, LOOP, size=limits.SMALL_BODY)) for _ in range(5)]
    await until(lambda: len(lane.walls) == limits.LONG_WORKERS)
    assert len(lane.queue) == 3
    await _cancelled(jobs)
    assert len(lane.queue) == 0, "what waited is not started"
    await until(lambda: not lane.walls)  # what ran is ended
    assert isinstance(await _ask(pool, size=limits.SMALL_BODY), contract.Prepared)


async def test_owners_take_turns(pool: WorkerPool) -> None:
    ended: list[str] = []

    async def one(owner: str, said: str) -> None:
        await asyncio.gather(_ask(pool, said, owner, limits.SMALL_BODY), return_exceptions=True)
        ended.append(owner)

    jobs = [asyncio.ensure_future(one("bad", LOOP)) for _ in range(8)]
    await until(lambda: bool(_lane(pool, "long prompts").walls))
    await one("good", "hi")
    assert ended.count("bad") <= 4
    await _cancelled(jobs)


async def test_the_owner_with_most_jobs_waiting_loses_one(pool: WorkerPool) -> None:
    size = limits.SMALL_BODY
    jobs = [asyncio.ensure_future(_ask(pool, LOOP, "bad", size)) for _ in range(8)]
    await until(lambda: len(_lane(pool, "long prompts").walls) == limits.LONG_WORKERS)
    assert not pool.refuse_one("bad")
    assert pool.refuse_one("good")
    await asyncio.sleep(0.01)
    assert [job.done() for job in jobs] == [False] * 7 + [True]
    with pytest.raises(Busy, match="6 requests of yours wait"):
        await jobs[-1]
    await _cancelled(jobs)


async def test_health_says_that_prompts_are_stuck(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "STARTS_S", 0.2)
    command, pool._command = pool._command, ("/bin/false",)
    assert pool._forker is not None
    pool._forker.kill()
    await until(lambda: pool.unhealthy_reason() is not None)
    assert "no worker" in str(pool.unhealthy_reason())
    waiting = asyncio.ensure_future(_ask(pool))
    pool._command = command
    assert isinstance(await waiting, contract.Prepared)
    assert pool.unhealthy_reason() is None
    lane = _lane(pool, "prompts")
    await until(lambda: not lane.walls)  # the answer comes before its worker is free again
    assert lane.stuck_s() == 0.0
    lane.queue.put("", "a task that no worker takes")
    lane.since -= limits.STUCK_S + 1.0
    assert "none ended for" in str(pool.unhealthy_reason())
    lane.queue.remove("", "a task that no worker takes")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for %}", "the chat template does not compile"),
        ("{{ ('a' * 10 ** 11)|length }}", "tokenizer and chat template take more than 4096 MiB"),
    ],
)
def test_a_template_is_loaded_with_limits(tmp_path: Path, template: str, words: str) -> None:
    served_folder.write(tmp_path, template)
    with pytest.raises(EngineError, match=words), served_folder.running(tmp_path):
        pass


def test_no_process_outlives_its_parent(folder: Path) -> None:
    code = f"""
import asyncio
from pathlib import Path
from tests.runtime.server.prompts import test_pool, served_folder
async def main():
    pool = await served_folder._started(Path({str(folder)!r}))
    job = asyncio.ensure_future(test_pool._ask(pool, served_folder.LOOP, size=1 << 17))
    await test_pool.until(lambda: bool(test_pool._lane(pool, "long prompts").walls))
    print(pool._forker.pid, *(worker.pid for worker in pool.workers), flush=True)
    await job
asyncio.run(main())
"""
    root = str(Path(__file__).parents[4])
    paths = [os.environ.get("PYTHONPATH", ""), root]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env)
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    process.kill()
    process.wait()
    assert len(pids) > 1
    wait(lambda: not any(_runs(pid) for pid in pids), "the end of all")


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
