"""Rank 0 is stopped, by a debugger or with its whole machine, and continues: no peer was late."""

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

import pytest

from spark_engine.errors import ExecutorError
from spark_engine.runtime.ranks import channel, running_clock
from spark_engine.runtime.ranks import group as module
from spark_engine.runtime.ranks.channel import PacketRing, Sender, ring_bytes
from spark_engine.runtime.ranks.links import Links
from spark_engine.runtime.ranks.messages import Opened
from spark_engine.runtime.ranks.running_clock import MOST_S, TICK_S, RunningClock
from tests.checkpoints import write_checkpoint
from tests.runtime.ranks.test_group import BEGIN, fast, pair, say
from tests.runtime.ranks.test_rank_processes import AT_LENGTH, SERVED, SHALLOW, gone, make

STOP_S = 1000.0
LONG_S = 12.0  # longer than the counted part of several stops, shorter than one stop
LIMIT_S = 2.0  # a stop may count for MOST_S of it


class Time:
    """The system's clock, which the test may advance."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead

    def jump(self) -> None:
        """Advances it as a stop of the process does."""
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
    """A rank 0 that is stopped while it leaves such a step is not ended either; a real hang is."""
    ended = fast(monkeypatch, DEVICE_S=LONG_S, GRACE_S=LONG_S).codes
    with pair() as (group, _):
        group.waiting(True)
        for _ in range(3):
            clock.jump()
            time.sleep(0.1)
            group.check()
        _until(lambda: group._failure is not None, clock)
        with pytest.raises(ExecutorError, match=r"has waited for rank 0's device for \d\d s"):
            group.check()
        for _ in range(3):
            clock.jump()
            time.sleep(0.1)
            assert not ended
        _until(lambda: bool(ended), clock)


def test_an_opening_continues_after_rank_0_was_stopped(
    clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUIET_S", LONG_S)
    with pair() as (group, theirs):
        group.begin(BEGIN, device=False)
        with ThreadPoolExecutor(1) as pool:
            opened = pool.submit(group.all_open)
            for _ in range(3):
                time.sleep(2 * TICK_S)
                clock.jump()
            time.sleep(2 * TICK_S)
            say(theirs, Opened(1))
            opened.result(60)


def _until(done: Callable[[], bool], clock: Time | None = None) -> None:
    """Each jump counts little; enough jumps reach the limit."""
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)
        if clock is not None:
            clock.jump()


def test_a_call_continues_where_the_others_were_stopped_too(clock: Time) -> None:
    """The rank that runs first finds the others stopped, and gives them the usual limit."""
    ends = socket.socketpair()
    first, second = Links(0, {1: ends[0]}, LONG_S), Links(1, {0: ends[1]}, LONG_S)
    with closing(first), closing(second):
        for jumps in (1, 3):
            with ThreadPoolExecutor(1) as other:
                found = other.submit(first.exchange, "sum", 2, b"ab")
                for _ in range(jumps):
                    time.sleep(2 * TICK_S)
                    clock.jump()
                assert second.exchange("sum", 2, b"cd") == {0: bytearray(b"ab")}
                assert found.result() == {1: bytearray(b"cd")}


def test_plans_continue_where_their_reader_was_stopped_too(
    clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "RING_BYTES", 1 << 16)
    memory = os.memfd_create("ring")
    os.ftruncate(memory, ring_bytes(2))
    for ring, size in ((None, 4 << 20), (PacketRing(memory, 2), 1 << 15)):
        mine, theirs = socket.socketpair()
        with mine, theirs, ThreadPoolExecutor(1) as other:
            sender = Sender({1: mine}, ring, LONG_S)
            reader = channel.Receiver(1, theirs, ring)
            packets = [bytes([n]) * size for n in range(4)]
            sent = other.map(sender.send, packets)
            time.sleep(2 * TICK_S)
            clock.jump()
            assert [reader.receive() for _ in packets] == packets
            assert [*sent] == [None] * len(packets)
    os.close(memory)


RANK_0 = """
import os, signal, sys
from contextlib import closing
from pathlib import Path
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.ranks import spawn
from spark_engine.runtime.ranks.links import Links
from tests.runtime.ranks.test_rank_processes import drain, requests
folder, limit_s, alone = sys.argv[1:]
spawn.CPU_LIMIT_S, calls, exchange = float(limit_s), [], Links.exchange

def counted(*given):
    calls.append(0)
    if len(calls) == stop:
        for pid in [os.getpid()] if int(alone) else [other, os.getpid()]:
            os.kill(pid, signal.SIGSTOP)
    return exchange(*given)

with closing(Engine.open(Path(folder), EngineOptions())) as engine:
    other, stop = engine.loaded.group.pids[1], -1
    print(other, flush=True)
    first = drain(engine, requests()[:4])
    Links.exchange, stop = counted, 100
    assert [*drain(engine, requests()[:4]).values()] == [*first.values()]
    assert len(calls) > stop
"""


@pytest.mark.parametrize(
    "alone", [pytest.param(True, id="alone"), pytest.param(False, id="all", marks=AT_LENGTH)]
)
def test_a_group_continues_after_rank_0_was_stopped(alone: bool, tmp_path: Path) -> None:
    """Alone while the other rank waits for it, or together with the other, which continues a little
    later."""
    write_checkpoint(tmp_path / "c", SHALLOW, "bf16")
    engine = make(tmp_path / "c", 2, SERVED)
    command = [sys.executable, "-c", RANK_0, str(engine), str(LIMIT_S), str(int(alone))]
    root = Path(__file__).parents[3]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdout is not None
        other = int(process.stdout.readline())
        _until(lambda: _stopped(process.pid))
        time.sleep(LIMIT_S + 0.4)
        for pid in [process.pid] if alone else [process.pid, other]:
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.3)
        assert process.wait(60) == 0
    assert gone([other])


def _stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
