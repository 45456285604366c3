"""Faults in a server and the one outcome of each: docs/operate/failures.md has the table.

A real engine process and the real loop, over executors without a model; the HTTP face without a
socket.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from spark_engine.command import command
from spark_engine.runtime.server.engine_client import engine_process
from spark_engine.runtime.server.engine_client import supervisor as module
from spark_engine.runtime.server.engine_client.client import EngineClient
from spark_engine.runtime.server.engine_client.supervisor import Supervision
from spark_engine.runtime.server.http.app import create_app
from spark_engine.runtime.server.http.endpoints import Endpoints
from spark_engine.runtime.server.service.service import Service
from tests.patient import until
from tests.repository import PATH
from tests.runtime import faulty_engine
from tests.runtime.fake_client import inline
from tests.runtime.faulty_engine import NAN, order
from tests.soak.idle_state import check_state

TEXT = "/v1/completions"
HANGS_S = 1000.0  # the watchdog's; `Running.hung` lets so long pass
LONG = {"prompt": [5, 6, 7], "max_tokens": 700, "ignore_eos": True, "seed": 1}
SHORT = {"prompt": [8, 9], "max_tokens": 4, "ignore_eos": True, "seed": 2}


class Clock:
    """The supervisor's time, to which a test adds."""

    more = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.more


class Running:
    def __init__(
        self, folder: Path, how: Supervision, max_queue: int, clock: Clock, step_s: float
    ) -> None:
        self.folder, self.clock = folder, clock
        command = (sys.executable, "-P", faulty_engine.__file__, str(folder), str(step_s))
        self.client = EngineClient(command, max_queue, how)
        self.http: httpx.AsyncClient

    async def ask(self, body: dict[str, Any] | None = None) -> httpx.Response:
        return await self.http.post(TEXT, json=body or SHORT)

    def ask_later(self, body: dict[str, Any]) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(self.ask(body))

    async def taken(self) -> None:
        await until(lambda: not (self.folder / "fault").exists())

    def settled(self) -> bool:
        """The engine runs again, or never will."""
        return self.client.died.is_set() or self.client.unhealthy_reason() is None

    def hung(self) -> None:
        self.clock.more += 2 * HANGS_S

    async def long(self) -> asyncio.Task[httpx.Response]:
        """A request that has tokens."""
        asked = self.ask_later(LONG)
        await until(lambda: self.client.stats.steps > 5)
        return asked

    async def short(self, fault: str) -> asyncio.Task[httpx.Response]:
        """A request that waits for a process which does not start so."""
        asked = self.ask_later(SHORT)
        await self.taken()
        order(self.folder, "load", fault)
        return asked

    async def health(self) -> str:
        answer = await self.http.get("/health")
        assert (answer.status_code == 200) == ("reason" not in answer.json())
        return str(answer.json().get("reason", ""))

    async def idle(self) -> None:
        """Waits until the engine reports that nothing is held."""
        await until(lambda: self.client.in_flight == 0)
        end = time.monotonic() + 90
        while wrong := await self._held():  # a cancellation may not have arrived yet
            assert time.monotonic() < end, wrong
            await asyncio.sleep(0.02)

    async def _held(self) -> list[str]:
        found = await self.client.dump("a test looks")
        assert found is not None
        lines = found.read_text().splitlines()
        state = json.loads(lines[lines.index("== engine process: state ==") + 1])
        found.unlink()
        return check_state(state, {"engine_client": {"in_flight": 0}})

    def dumps(self) -> list[str]:
        """The written dumps, the oldest first; they are removed."""
        paths = sorted(self.folder.glob("spark-dump-*"), key=lambda p: p.stat().st_mtime_ns)
        found = [path.read_text() for path in paths]
        for path in paths:
            path.unlink()
        return found


@asynccontextmanager
async def _running(
    folder: Path, max_queue: int = 100, step_s: float = 0.02, **options: Any
) -> AsyncIterator[Running]:
    how = Supervision(**{"watchdog_s": HANGS_S, "restarts": 100, "dumps": folder, **options})
    clock = Clock()
    module.time = clock  # type: ignore[assignment]
    running = Running(folder, how, max_queue, clock, step_s)
    try:
        info = await running.client.start()
        pool = inline(running.client, info, None, None)
        app = create_app(Endpoints(Service(running.client, info, None, pool, ["faulty"])))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as running.http:
            yield running
    finally:
        await running.client.close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(module, "LONGEST_PAUSE_S", 0.02)
    monkeypatch.setattr(module, "LATE_S", 1e9)  # a clock that is put forward
    monkeypatch.setattr(module, "time", time)
    monkeypatch.setattr(engine_process, "ANSWER_S", 60.0)
    monkeypatch.setattr(engine_process, "SIGNAL_S", 60.0)
    monkeypatch.setenv("PYTHONPATH", PATH)


FALLS = [  # stage, kind, text of the error, text of the dump ("": none is written)
    ("schedule", "raise", "RuntimeError: the step went wrong", "in fail"),
    ("_prepare", "kill", "ended with code -9", ""),
    ("_launch", "crash", "ended with code -11", "Segmentation fault"),
    ("_launch", "hang", "has not answered", '"launched"'),
    ("_collect", "hold", "has not answered", "in hold"),
    ("_postprocess", "exit", "ended with code 7", ""),
]


async def test_an_engine_that_falls_at_any_stage_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _running(tmp_path) as server:
        for i, (stage, kind, words, dumped) in enumerate(FALLS):
            long, before = await server.long(), server.client.pid
            order(server.folder, stage, kind)
            await server.taken()
            order(server.folder, "load", "late")
            waits = server.ask_later(SHORT)
            if kind in ("hang", "hold"):
                monkeypatch.setattr(engine_process, "ANSWER_S", 60.0 if kind == "hang" else 2.0)
                server.hung()
            answer = await asyncio.wait_for(long, 90)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (500, "engine_error"), (stage, kind)
            message = "the engine stopped and is starting again"
            assert error["message"] == f"{message}; send the request again", "and not why"
            assert await server.health() == message
            assert words in server.client.reason, "which the log says"
            (server.folder / "go").touch()
            found = await asyncio.wait_for(waits, 90)
            assert found.json()["usage"]["completion_tokens"] == 4, found.text
            assert await server.health() == "", (stage, kind)
            assert server.client.pid != before
            assert server.client.restarts == i + 1
            dumps = server.dumps()
            assert [dumped in text for text in dumps] == [True] * bool(dumped), (stage, dumps)
        metrics = (await server.http.get("/metrics")).text
        assert f'spark:engine_restarts_total{{model_name="faulty"}} {len(FALLS)}.0' in metrics
        await server.idle()


async def test_a_dump_of_a_hung_engine_has_its_stack_and_its_requests(tmp_path: Path) -> None:
    async with _running(tmp_path) as server:
        order(server.folder, "_launch", "hang")
        asked = server.ask_later({**SHORT, "max_tokens": 2})
        await server.taken()
        server.hung()
        assert (await asked).is_success, "it had no token, and a second process answered it"
        (text,) = server.dumps()
        lines = text.splitlines()
        assert lines[0].startswith("the watchdog ended the engine process: the engine has not")
        state = json.loads(lines[lines.index("== engine process: state ==") + 1])
        (batch,) = state["plan"]["batches"]
        assert batch["family"] == "prefill" and batch["rows"] == [{"id": 0, "start": 0, "count": 2}]
        assert [row["slot"] for row in state["sequences"]] == [0]
        assert "in step" in text and "_watch" in text, "stacks of both processes"


async def test_a_damaged_engine_is_not_tried_again(tmp_path: Path) -> None:
    async with _running(tmp_path) as server:
        long = await server.long()
        order(server.folder, "_launch", "kill")
        await server.taken()
        order(server.folder, "load", "refuse")
        waits = server.ask_later(SHORT)
        assert (await long).status_code == 500
        answer = await asyncio.wait_for(waits, 90)
        assert answer.status_code == 500 and "does not start again" in answer.text
        assert server.client.died.is_set() and server.client.exit_code == 2
        assert "does not start again" in await server.health()
        assert "is damaged" in server.client.reason and "again" in server.client.reason
        assert server.client.restarts == 1


async def test_memory_that_is_not_free_yet_is_tried_again(tmp_path: Path) -> None:
    async with _running(tmp_path) as server:
        order(server.folder, "_launch", "kill")
        assert (await asyncio.wait_for(await server.short("lack"), 90)).is_success
        assert server.client.restarts == 2 and server.client.reason.endswith("3 GiB are free")


async def test_memory_that_does_not_come_free_ends_the_server_so_that_it_is_started_again(
    tmp_path: Path,
) -> None:
    async with _running(tmp_path, restarts=1) as server:
        order(server.folder, "_launch", "kill")
        assert (await asyncio.wait_for(await server.short("lack"), 90)).status_code == 500
        assert server.client.died.is_set() and server.client.exit_code == 75


@pytest.mark.parametrize(("fault", "code"), [("lack", 75), ("refuse", 2)])
async def test_a_first_start_that_may_succeed_later_ends_with_its_own_code(
    tmp_path: Path, fault: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    order(tmp_path, "load", fault)
    with pytest.raises(SystemExit) as left, command("spark-run"):
        async with _running(tmp_path):
            pass
    assert left.value.code == code
    (line,) = capsys.readouterr().err.splitlines()
    assert ("3 GiB are free" if fault == "lack" else "is damaged") in line


async def test_too_many_deaths_are_the_last(tmp_path: Path) -> None:
    async with _running(tmp_path, restarts=2) as server:
        for _ in range(3):
            long = await server.long()
            order(server.folder, "_launch", "kill")
            assert (await asyncio.wait_for(long, 90)).status_code == 500
            await until(server.settled)
        assert server.client.died.is_set() and server.client.restarts == 2
        assert "code -9 (SIGKILL: out of memory?" in server.client.reason
        words = (await server.ask()).json()["error"]["message"]
        assert words == "the engine stopped and does not start again; the server's log says why"


async def test_a_wait_for_a_restart_has_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 1.0)
    monkeypatch.setattr(module, "LONGEST_PAUSE_S", 1.0)
    async with _running(tmp_path, wait_s=0.2) as server:
        order(server.folder, "_launch", "kill")
        answer = await server.ask()
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["code"] == "engine_restarting"
        await until(lambda: server.client.unhealthy_reason() is None)
        assert (await server.ask()).is_success


async def test_logits_that_are_not_finite_end_one_request(tmp_path: Path) -> None:
    async with _running(tmp_path) as server:
        sick = server.ask_later({**LONG, "prompt": [NAN, 5]})
        well = server.ask_later({**SHORT, "max_tokens": 30})
        answer = await sick
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_error")
        assert "non-finite" in answer.text
        assert (await well).json()["usage"]["completion_tokens"] == 30
        assert server.client.restarts == 0 and server.dumps() == []
        await server.idle()


async def test_pages_that_run_out_make_others_wait_and_a_full_queue_is_said(tmp_path: Path) -> None:
    async with _running(tmp_path, max_queue=1, step_s=0.001) as server:
        # four of them want 16 pages at their ends, and there are 12
        bodies = [{**LONG, "prompt": [5 + i, 6], "max_tokens": 240} for i in range(5)]
        assert server.client.pid is not None
        os.kill(server.client.pid, signal.SIGSTOP)  # no request ends while it is stopped
        tasks = [server.ask_later(body) for body in bodies]
        await until(lambda: server.client.in_flight == 5)
        refused = await server.ask()
        os.kill(server.client.pid, signal.SIGCONT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
        answers = await asyncio.gather(*tasks)
        assert [a.json()["usage"]["completion_tokens"] for a in answers] == [240] * 5
        assert server.client.stats.preemptions > 0
        await server.idle()


async def test_a_client_that_goes_leaves_nothing(tmp_path: Path) -> None:
    async with _running(tmp_path) as server:
        tasks = [server.ask_later({**LONG, "stream": i % 2 == 0}) for i in range(6)]
        await until(lambda: server.client.stats.running == 4)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.idle()
        assert server.client.stats.steps < 600, "they were not run to their ends"
