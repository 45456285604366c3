"""Which of several engines are loaded: clients without processes, memory in units, leaping time."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from spark_engine.errors import CapacityError, EngineError
from spark_engine.interface import Limits
from spark_engine.runtime.engine.request import Event, FinishReason, Request, SamplingParams
from spark_engine.runtime.server.engine_client.client import Answer, Busy, EngineDied, Mailbox
from spark_engine.runtime.server.engine_client.engine_process import Death
from spark_engine.runtime.server.engine_client.ipc import EngineInfo, Stats, StepReport
from spark_engine.runtime.server.engine_client.on_demand import NotLoaded, OnDemandClient
from spark_engine.runtime.server.engine_client.residency import TURN_S, Residency, Resident
from spark_engine.runtime.server.engine_client.supervisor import LONGEST_PAUSE_S, Supervision
from tests.clocks import leap

INFO = EngineInfo("fake", Limits(max_seqs=4, max_context=64, pages=8, vocab=64), (1,))
REQUEST = Request([1, 2], SamplingParams(max_tokens=1))
NEVER = 1000.0


class Scripted(OnDemandClient):
    """Its process is a task; `start` waits for `gate`, and fails as `fault` says."""

    def __init__(self, name: str, wait_s: float = NEVER, queue: int = 256) -> None:
        super().__init__(name, INFO, ("none",), queue, Supervision(wait_s=wait_s))
        self.gate, self.fault = asyncio.Event(), list[Death]()
        self.gate.set()
        self.excused = list[Mailbox]()  # of requests that were there when it did not start, or died
        self.events = list[str]()  # in the order of what happened to all of them, if shared
        self.running_ids = list[int]()
        self.check: Callable[[], None] = lambda: None

    async def start(self) -> EngineInfo:
        self.check()
        self.events.append("+" + self.name)
        await self.gate.wait()
        if self.fault:
            death = self.fault.pop()
            self._give_up(death)
            raise (CapacityError if death.passing else EngineError)(death.reason)
        self._task = asyncio.create_task(self._runs())
        self.running = True
        self.on_engine_ready()
        return INFO

    def _give_up(self, death: Death) -> None:
        self.excused += [one.box for one in self._open.values()]
        super()._give_up(death)

    async def _runs(self) -> None:
        await asyncio.Event().wait()

    async def _unload(self) -> None:
        self.events.append("-" + self.name)
        assert not self.running_ids, "a request runs in an engine that is unloaded"
        await super()._unload()

    def send(self, *frames: bytes) -> None:
        """A request: the newest that was sent and is not known yet."""
        known = {*self.running_ids}
        sent = [n for n, one in self._open.items() if one.timer is None and one.sends]
        self.running_ids += [n for n in sent if n not in known]

    def finish(self) -> None:
        end = Event(self.running_ids.pop(0), 7, finish=FinishReason.LENGTH)
        self.on_step(StepReport([end], Stats(), []))


class Bench:
    """Engines of some units each, in a memory."""

    def __init__(self, sizes: dict[str, int], budget: int, **how: Any) -> None:
        given = {k: how.pop(k) for k in ("wait_s", "queue") if k in how}
        self.events = list[str]()
        self.engines = {name: Scripted(name, **given) for name in sizes}
        rows = [Resident(e, sizes[n], "m", lambda e=e: e.in_flight) for n, e in self.all]  # type: ignore[misc]
        self.residency, self.budget = Residency(rows, {"m": budget}, **how), budget
        self.boxes = list[Mailbox]()
        for engine in self.engines.values():
            engine.events, engine.check = self.events, self.fits

    @property
    def all(self) -> list[tuple[str, Scripted]]:
        return list(self.engines.items())

    def fits(self) -> None:
        assert self.residency.taken("m") <= self.budget, "more memory is planned than there is"

    def ask(self, name: str) -> Mailbox:
        box: Mailbox = asyncio.Queue()
        self.engines[name].submit([REQUEST], box, 4)
        self.boxes.append(box)
        return box

    async def settle(self) -> None:
        for _ in range(30):
            await asyncio.sleep(0)
            self.fits()
        await asyncio.sleep(0.01)

    async def done(self, name: str) -> None:
        await self.settle()
        self.engines[name].finish()
        await self.settle()

    async def served(self, name: str) -> None:
        """A request of this engine is answered."""
        box = self.ask(name)
        await self.done(name)
        assert isinstance(_answer(box), list)

    async def until(self, ok: Callable[[], bool], seconds: float = 30.0) -> None:
        async with asyncio.timeout(seconds):
            while not ok():
                self.fits()
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def _open(sizes: dict[str, int], budget: int, **how: Any) -> AsyncIterator[Bench]:
    made = Bench(sizes, budget, **how)
    try:
        await made.residency.begin()
        yield made
    finally:
        await made.residency.close()
        for _, engine in made.all:
            await engine.close()


@pytest.fixture(autouse=True)
def run() -> Callable[[Coroutine[Any, Any, None]], None]:
    """Runs the tests that are coroutines."""
    return leap


def _answer(box: Mailbox) -> Answer:
    return box.get_nowait()


async def test_the_least_recently_used_idle_engine_leaves_for_another() -> None:
    async with _open({"a": 1, "b": 1, "c": 1}, 2) as bench:
        assert bench.events == ["+a", "+b"], "at the start as many as fit, in their order"
        assert [e.state for _, e in bench.all] == ["loaded", "loaded", "unloaded"]
        for name in "abac":
            await bench.served(name)
        assert bench.events[2:] == ["-b", "+c"]
        bench.ask("b")
        await bench.settle()
        assert bench.events[4:] == ["-a", "+b"]
        assert bench.engines["b"].loads == 2


async def test_a_large_engine_takes_the_memory_of_several_and_is_not_overtaken() -> None:
    async with _open({"a": 1, "b": 1, "large": 2, "c": 1}, 2) as bench:
        bench.ask("a")
        await bench.settle()
        bench.ask("large")
        await bench.settle()
        bench.ask("c")  # would fit next to a
        await bench.settle()
        assert bench.events == ["+a", "+b", "-b"], "b is idle, a works"
        await bench.done("a")
        await bench.settle()
        assert bench.events[3:] == ["-a", "+large"]
        await bench.done("large")
        await bench.settle()
        assert bench.events[5:] == ["-large", "+c"]


async def test_an_engine_that_always_works_takes_turns() -> None:
    async with _open({"a": 1, "b": 1}, 1, turn_s=0.0) as bench:
        first, late = bench.ask("a"), bench.ask("b")
        await bench.settle()
        assert bench.events == ["+a"]
        engine = bench.engines["a"]
        second = bench.ask("a")
        assert not engine.accepting and len(engine.running_ids) == 1
        engine.finish()
        assert isinstance(_answer(first), list)
        await bench.until(lambda: bench.engines["b"].running)
        bench.engines["b"].finish()
        assert isinstance(_answer(late), list)
        await bench.until(lambda: engine.running)
        engine.finish()
        assert isinstance(_answer(second), list)
        assert bench.events == ["+a", "-a", "+b", "-b", "+a"]


async def test_a_turn_is_not_cut_and_not_kept_for_one_that_left() -> None:
    async with _open({"a": 1, "b": 1}, 1) as bench:
        bench.ask("a")
        bench.ask("b")
        await bench.settle()
        engine = bench.engines["a"]
        await asyncio.sleep(TURN_S - 1)
        assert engine.accepting, "its turn has not ended"
        bench.engines["b"].cancel_all()
        await asyncio.sleep(TURN_S)
        bench.ask("a")
        assert len(engine.running_ids) == 2, "no request waits for its memory"
        engine.finish()
        engine.finish()
        await bench.settle()
        assert bench.events == ["+a"]


async def test_a_switch_that_has_started_is_completed() -> None:
    """A client that waits for less time than the requests of others take is answered anyway."""
    async with _open({"a": 1, "b": 1}, 1, wait_s=30) as bench:
        engine = bench.engines["a"]

        async def long() -> None:
            """A request of 100 s each 40 s, so that always one runs."""
            while True:
                bench.ask("a")
                loop.call_later(100, lambda: engine.running_ids and engine.finish())
                await asyncio.sleep(40)

        loop = asyncio.get_running_loop()
        load = asyncio.create_task(long())
        tries = list[Answer]()
        while not any(isinstance(answer, list) for answer in tries):
            box = bench.ask("b")
            while box.empty():
                if bench.engines["b"].running_ids:
                    bench.engines["b"].finish()
                await asyncio.sleep(0.1)
            tries.append(_answer(box))
            assert loop.time() < 300
            await asyncio.sleep(1)
        load.cancel()
        assert len(tries) > 1 and isinstance(tries[0], NotLoaded)


async def test_an_engine_has_a_turn_also_if_those_that_waited_have_left() -> None:
    async with _open({"a": 1, "b": 1}, 1, wait_s=30) as bench:
        bench.ask("a")
        await asyncio.sleep(TURN_S)
        vain = bench.ask("b")
        await asyncio.sleep(31)
        assert isinstance(_answer(vain), NotLoaded)
        other = bench.ask("a")
        await bench.done("a")
        await asyncio.sleep(TURN_S - 1)
        await bench.served("b")
        await bench.done("a")
        assert isinstance(_answer(other), list)
        assert bench.events == ["+a", "-a", "+b", "-b", "+a"]
        bench.ask("a")
        bench.ask("b")
        await asyncio.sleep(TURN_S + 1)
        bench.engines["b"].cancel_all()
        bench.ask("a")
        await bench.done("a")
        assert bench.events[5:] == ["-a", "+b"], "its turn is kept"
        await asyncio.sleep(TURN_S)
        assert bench.events[7:] == ["-b", "+a"], "and ends"


async def test_an_engine_that_failed_for_hours_is_loaded_soon_after_its_repair() -> None:
    """The pause between tries has a bound, and others that always work end their turns for it."""
    async with _open({"a": 1, "b": 1, "c": 1}, 1) as bench:

        async def load(name: str) -> None:
            while True:
                bench.ask(name)
                await asyncio.sleep(2)
                while bench.engines[name].running_ids:
                    bench.engines[name].finish()

        broken = bench.engines["b"]
        broken.fault = [Death("damaged", user=True) for _ in range(1100)]
        while broken.fault:
            with contextlib.suppress(NotLoaded):
                bench.ask("b")
            await asyncio.sleep(LONGEST_PAUSE_S)
        works = [asyncio.create_task(load(name)) for name in "ac"]
        box = None
        end = asyncio.get_running_loop().time() + LONGEST_PAUSE_S + 2 * (TURN_S + 4)
        while not broken.running:
            assert asyncio.get_running_loop().time() < end
            with contextlib.suppress(NotLoaded):
                box = bench.ask("b") if box is None else box
            await asyncio.sleep(0.5)
        await bench.done("b")
        for work in works:
            work.cancel()
        assert box is not None and isinstance(_answer(box), list)


@pytest.mark.parametrize("passing", [False, True])
async def test_an_engine_that_does_not_start_ends_its_waiters_alone(passing: bool) -> None:
    async with _open({"a": 1, "b": 1}, 1) as bench:
        broken = bench.engines["b"]
        broken.fault = [Death("weights.safetensors is damaged", not passing, passing)]
        broken.gate.clear()
        boxes = [bench.ask("b"), bench.ask("b")]
        await bench.settle()
        assert broken.state == "loading"
        broken.gate.set()
        await bench.settle()
        for box in boxes:
            answer = _answer(box)
            assert isinstance(answer, NotLoaded) and "model b" in str(answer)
            assert "damaged" not in str(answer), "clients do not read the server's paths"
        assert broken.state == "failed" and broken.unhealthy_reason() is not None
        with pytest.raises(NotLoaded, match="model b"):
            bench.ask("b")
        await bench.served("a")
        await bench.until(lambda: broken.state == "unloaded")
        assert broken.unhealthy_reason() is None
        await bench.served("b")  # it was repaired
        assert not broken.died.is_set(), "the server continues"


async def test_waiting_is_bounded_in_number_and_time() -> None:
    async with _open({"a": 1, "b": 1}, 2, wait_s=10, queue=2) as bench:
        await bench.engines["b"].unload()
        bench.engines["b"].gate.clear()
        boxes = [bench.ask("b") for _ in range(4 + 2)]
        with pytest.raises(Busy, match="waiting"):
            bench.ask("b")
        for box in boxes:
            answer = await asyncio.wait_for(box.get(), 30)
            assert isinstance(answer, NotLoaded) and "not loaded within" in str(answer)
        assert bench.engines["b"].in_flight == 0


async def test_idle_engines_are_unloaded_and_come_back() -> None:
    async with _open({"a": 1, "b": 1}, 2, idle_s=20) as bench:
        bench.ask("a")
        await asyncio.sleep(19)
        assert bench.engines["b"].resident
        await bench.until(lambda: not bench.engines["b"].resident, 2)
        assert bench.engines["a"].running, "a request runs"
        bench.engines["a"].finish()
        await bench.until(lambda: bench.residency.taken("m") == 0)
        assert [e.state for _, e in bench.all] == ["unloaded"] * 2
        await bench.served("b")


def test_at_the_start_damage_ends_the_server_and_a_lack_of_memory_does_not() -> None:
    async def begin(*deaths: Death | None) -> Bench:
        bench = Bench(dict.fromkeys("abc"[: len(deaths)], 1), 9)
        for death, (_, engine) in zip(deaths, bench.all, strict=True):
            engine.fault = [] if death is None else [death]
        try:
            await bench.residency.begin()
        finally:
            await bench.residency.close()
            for _, engine in bench.all:
                await engine.close()
        return bench

    damaged, short = Death("damaged", user=True), Death("70 GiB", user=True, passing=True)
    with pytest.raises(EngineError, match="damaged"):
        leap(begin(None, damaged))
    with pytest.raises(CapacityError, match="70 GiB"):
        leap(begin(short, short))
    assert leap(begin(short, None)).events == ["+a", "+b"]


@pytest.mark.parametrize("seed", range(6))
async def test_no_request_is_lost_while_engines_come_and_go(seed: int) -> None:
    """Random requests, ends, deaths and faults: every request ends once, with an answer or with the
    error of a fault, and the plan is never exceeded."""
    rng = random.Random(seed)
    sizes = {name: rng.randint(1, 3) for name in "abcde"}
    async with _open(sizes, 4, turn_s=1.0) as bench:
        for _ in range(400):
            name, engine = rng.choice(bench.all)
            match rng.randint(0, 9):
                case 0 | 1 | 2 | 3:
                    with contextlib.suppress(NotLoaded):
                        bench.ask(name)
                case 4 | 5 | 6 if engine.running_ids:
                    engine.finish()
                case 7 if engine.state == "unloaded" and rng.random() < 0.2:
                    engine.fault = [Death("fault", user=True)]
                case 8 if engine.running and rng.random() < 0.5:  # its process dies for good
                    task, engine._task = engine._task, None
                    assert task is not None
                    task.cancel()
                    engine.running_ids.clear()
                    engine._give_up(Death("killed"))
                case 9:
                    engine.gate.clear() if rng.random() < 0.3 else engine.gate.set()
            for _ in range(rng.randint(0, 4)):
                await asyncio.sleep(rng.choice((0, 0, 0, 0.3)))
                bench.fits()
        for _, engine in bench.all:
            engine.gate.set()
            engine.fault = []
        while any(engine.in_flight for _, engine in bench.all):
            for _, engine in bench.all:
                if engine.running_ids:
                    engine.finish()
            await asyncio.sleep(0.1)
            bench.fits()
        excused = {id(box) for _, engine in bench.all for box in engine.excused}
        answers = [(_answer(box), id(box) in excused) for box in bench.boxes]
        assert all(box.empty() for box in bench.boxes)
        for answer, fault in answers:
            assert isinstance(answer, (NotLoaded, EngineDied) if fault else list)
        assert {True, False} == {fault for _, fault in answers}
        assert len(bench.events) > 8, "engines were switched"
