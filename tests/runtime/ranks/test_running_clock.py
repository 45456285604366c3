"""Rank 0 is stopped, as by a debugger or with its whole machine, and goes on: nobody was late."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from spark_engine.errors import ExecutorError
from spark_engine.runtime.ranks import channel, running_clock
from spark_engine.runtime.ranks import group as module
from spark_engine.runtime.ranks.channel import Ring, Sender, ring_bytes
from spark_engine.runtime.ranks.group import Group
from spark_engine.runtime.ranks.links import Links
from spark_engine.runtime.ranks.running_clock import MOST_S, TICK_S, RunningClock
from tests.checkpoints import write_checkpoint
from tests.runtime.ranks.test_group import NoCalls
from tests.runtime.ranks.test_rank_processes import AT_LENGTH, SERVED, SHALLOW, gone, make

STOP_S = 1000.0
LIMIT_S = 2.0  # of which a stop may take MOST_S


class Time:
    """The system's clock, which may be set forward."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead

    def jump(self) -> None:
        """As a process finds it that was stopped."""
        self.ahead += STOP_S


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Time]:
    given = Time()
    monkeypatch.setattr(running_clock, "time", given)
    yield given


def test_a_stop_counts_as_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    at = [100.0]
    monkeypatch.setattr(running_clock, "time", SimpleNamespace(monotonic=lambda: at[0]))
    own = RunningClock()
    for step, counted in ((TICK_S, TICK_S), (MOST_S, MOST_S), (STOP_S, MOST_S), (0.0, 0.0)):
        at[0] += step
        before = own.last
        assert own.now() == own.last == before + counted
    assert 2 * TICK_S < MOST_S, "no tick counts as a stop on a busy machine"


def test_a_step_that_waited_while_rank_0_was_stopped_does_not_hang(
    clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is rank 0 ended that was stopped while it left such a step; whatever else hangs, is."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(module, "TICK_S", 0.02)
    monkeypatch.setattr(module, "DEVICE_S", 2.5)
    mine, theirs = socket.socketpair()
    with theirs, closing(Group(cast(Any, NoCalls()), {1: mine}, {})) as group:
        group.waiting(True)
        clock.jump()
        time.sleep(0.2)
        group.check()
        clock.jump()
        clock.jump()
        time.sleep(0.2)
        group.check()
        clock.jump()  # the third moment: of these it may have waited as long
        _until(lambda: group._fallen is not None)
        with pytest.raises(ExecutorError, match="has waited for rank 0's device for 3 s"):
            group.check()
        clock.jump()
        time.sleep(0.2)
        assert not ended
        clock.jump()
        _until(lambda: bool(ended))


def _until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_call_goes_on_where_the_others_were_stopped_too(clock: Time) -> None:
    """Who runs first finds the others at rest; they are given as long as before."""
    ends = socket.socketpair()
    first, second = Links(0, {1: ends[0]}, 3.5), Links(1, {0: ends[1]}, 3.5)
    with closing(first), closing(second):
        for jumps in (1, 3):
            with ThreadPoolExecutor(1) as other:
                found = other.submit(first.exchange, "sum", 2, b"ab")
                for _ in range(jumps):
                    time.sleep(2 * TICK_S)
                    clock.jump()
                assert second.exchange("sum", 2, b"cd") == {0: bytearray(b"ab")}
                assert found.result() == {1: bytearray(b"cd")}


def test_plans_go_on_where_who_reads_them_was_stopped_too(
    clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the socket, and through the ring."""
    monkeypatch.setattr(channel, "RING_BYTES", 1 << 16)
    memory = os.memfd_create("ring")
    os.ftruncate(memory, ring_bytes(2))
    for ring, size in ((None, 4 << 20), (Ring(memory, 2), 1 << 15)):
        mine, theirs = socket.socketpair()
        with mine, theirs, ThreadPoolExecutor(1) as other:
            sender = Sender({1: mine}, ring, 2.5)
            reader = channel.Receiver(1, theirs, ring)
            packets = [bytes([n]) * size for n in range(4)]
            told = other.map(sender.send, packets)
            time.sleep(2 * TICK_S)
            clock.jump()
            assert [reader.receive() for _ in packets] == packets
            assert [*told] == [None] * len(packets)
    os.close(memory)


RANK_0 = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.ranks import spawn
from tests.runtime.ranks.test_rank_processes import drain, requests
spawn.CPU_LIMIT_S = float(sys.argv[2])
asked = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), asked.set()), daemon=True).start()
with closing(Engine.open(Path(sys.argv[1]), EngineOptions())) as engine:
    print(engine.loaded.group.pids[1], flush=True)
    first = drain(engine, requests()[:4])
    while not asked.is_set():
        assert [*drain(engine, requests()[:4]).values()] == [*first.values()]
"""


@pytest.mark.parametrize(
    "alone", [pytest.param(True, id="alone"), pytest.param(False, id="all", marks=AT_LENGTH)]
)
def test_a_group_goes_on_after_rank_0_was_stopped(alone: bool, tmp_path: Path) -> None:
    """Alone while the other waits for it, or with the other, which goes on a little later."""
    write_checkpoint(tmp_path / "c", SHALLOW, "bf16")
    engine = make(tmp_path / "c", 2, SERVED)
    command = [sys.executable, "-c", RANK_0, str(engine), str(LIMIT_S)]
    pipe, root = subprocess.PIPE, Path(__file__).parents[3]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=root) as process:
        assert process.stdout is not None
        other = int(process.stdout.readline())
        stopped = [process.pid] if alone else [process.pid, other]
        time.sleep(0.5)
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(LIMIT_S + 0.4)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.3)
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert gone([other])
