"""A directory may be lost: the list of replicas and the plan are restored."""

import asyncio
import gc
import threading
import time
from typing import Any

import pytest

from spark_engine.runtime.replicas import directory as module
from spark_engine.runtime.replicas.directory import (
    LEASE_S,
    NOTHING,
    Directory,
    Heartbeat,
    Members,
    Rows,
)
from spark_engine.runtime.replicas.fleet import Address
from tests.runtime.replicas.front_world import until, world


def test_a_replica_without_heartbeats_is_no_longer_listed() -> None:
    now = [100.0]
    found = Directory(lambda: now[0])
    found.register("a", "http://a", NOTHING)
    now[0] += LEASE_S - 1
    found.register("b", "http://b", NOTHING)
    assert found.names() == ([("a", "http://a"), ("b", "http://b")], True)
    now[0] += 2
    assert found.names() == ([("b", "http://b")], False)
    found.drop("b")
    assert found.names() == ([], False)


def test_a_new_directory_learns_the_newest_plan_from_the_replicas() -> None:
    old = Directory()
    old.note(b"first")
    late = old.register("a", "http://a", NOTHING)
    old.note(b"second")
    known = old.register("b", "http://b", NOTHING)
    new = Directory()
    assert new.plan() == b""
    new.register("a", "http://a", late)
    assert new.plan() == b"first"
    assert new.register("b", "http://b", known) == known and new.plan() == b"second"
    assert new.register("a", "http://a", late) == known, "a late heartbeat gets the newest plan"
    new.note(b"")  # all is removed: a replica that is shutting down must not place it again
    new.register("a", "http://a", known)
    assert new.plan() == b""


def test_what_is_noted_is_newer_than_what_a_faster_clock_noted() -> None:
    found = Directory()
    found.register("a", "http://a", (time.time_ns() + 10**12, b"of a fast clock"))
    found.note(b"mine")
    assert found.plan() == b"mine"


async def test_a_new_directory_removes_no_replica() -> None:
    answers: list[tuple[Rows, bool]] = [
        ([("a", "http://a"), ("b", "http://b")], True),
        ([], True),
        ([("c", "http://c")], True),
        ([("b", "http://b2"), ("c", "http://c")], False),
    ]
    members = Members(lambda: answers.pop(0))
    assert {a.name for a in await members()} == {"a", "b"}
    assert {a.name for a in await members()} == {"a", "b"}, "the directory is new"
    assert {a.name for a in await members()} == {"a", "b", "c"}
    assert list(await members()) == [Address("b", "http://b2"), Address("c", "http://c")]


async def test_a_directory_that_hangs_blocks_neither_loop_nor_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "ASK_S", 0.05)
    gate, asked = threading.Event(), []

    def ask() -> tuple[Rows, bool]:
        asked.append(True)
        gate.wait(120)
        return [("a", "http://a")], False

    members = Members(ask)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await members()  # it has not answered
    assert len(asked) == 1, "it is asked once, until it answers"
    gate.set()
    monkeypatch.setattr(module, "ASK_S", 120.0)
    assert [a.name for a in await members()] == ["a"]


def test_a_directory_that_is_slow_is_heard(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "ASK_S", 0.04)
    gate, fails = threading.Event(), False

    def ask() -> tuple[Rows, bool]:
        assert gate.wait(120)
        gate.clear()
        if fails:
            raise ConnectionError("the directory died")
        return [("a", "http://a")], False

    async def test() -> None:
        nonlocal fails
        members = Members(ask)

        async def late() -> None:
            with pytest.raises(TimeoutError):
                await members()
            gate.set()
            asked = members._asked
            assert asked is not None
            await until(asked.done)

        for _ in range(2):
            await late()
            assert [a.name for a in await members()] == ["a"], "it was late, not lost"
        fails = True
        await late()
        with pytest.raises(ConnectionError):
            await members()
        await late()  # the next failure's exception is not retrieved

    asyncio.run(test())
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_a_replica_tells_until_it_stops() -> None:
    reported: list[Any] = []
    often = threading.Event()

    def tell(plan: Any) -> Any:
        reported.append(plan)
        if len(reported) == 2:
            raise ConnectionError("the directory died")
        if len(reported) > 3:
            often.set()
        return (len(reported), b"")

    telling = Heartbeat(tell, 0.001)
    assert often.wait(60)
    telling.stop(60)
    count = len(reported)
    assert reported[:4] == [NOTHING, (1, b""), (1, b""), (3, b"")], "the newest plan that it knows"
    time.sleep(0.02)
    assert len(reported) == count


async def test_requests_continue_without_a_directory(caplog: pytest.LogCaptureFixture) -> None:
    async def away() -> list[Address]:
        raise ConnectionError("the directory died")

    caplog.set_level("INFO")
    async with world("a", "b") as w:
        there = w.fleet._members
        w.fleet._members = away
        for _ in range(3):
            await w.fleet.look()
            assert (await w.ask("hi"))[0] == 200
        assert caplog.text.count("the directory died") == 1, "once, not with every check"
        w.fleet._members = there
        await w.fleet.look()
        assert len(w.fleet.up) == 2
    assert "the list of replicas is available again" in caplog.text
