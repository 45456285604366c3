"""A rank's reports while it opens, by which rank 0 sees progress."""

import math
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from spark_engine.runtime.cli import rank_process
from spark_engine.runtime.ranks import open_progress
from spark_engine.runtime.ranks.channel import Receiver, read_answer
from spark_engine.runtime.ranks.communicator import LinkCommunicator
from spark_engine.runtime.ranks.messages import ANSWER, Opening
from spark_engine.runtime.ranks.open_progress import REPORT_S, ReportedProgress
from spark_engine.runtime.ranks.spawn import RankChannels, RankSpec
from tests.runtime.ranks.test_group import BEGIN, SOON_S

WAITS = "waiting for other ranks"


class Waits:
    """A communicator that provides only `at_wait`."""

    limit_s = 0.0

    def at_wait(self, work: Callable[[], None]) -> None:
        self.work = work


def test_every_stage_is_reported_and_once_a_second_its_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at, reported = [0.0], list[str]()
    monkeypatch.setattr(open_progress, "time", SimpleNamespace(monotonic=lambda: at[0]))
    own = ReportedProgress(reported.append)
    own.say("reading")
    for done in range(8):  # four of them within a second
        own.advance(done, 8)
        at[0] += REPORT_S / 4
    own.mark("files")
    for _ in range(2):
        own.wait()
    assert reported == ["reading", "reading: 0 %", "reading: 50 %", "after files", WAITS]


def test_rank_0_learns_how_far_an_opening_is_and_that_it_waits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Reports end with the opening; a closed connection is not an error of the opening."""
    mine, theirs = socket.socketpair()
    comm, said = Waits(), list[str]()

    def load(path: Path, mark: Any, shown: Any, comm: Waits, **how: object) -> str:
        assert comm.limit_s == math.inf
        shown.say("reading")
        mark("files")
        comm.work()
        for _ in range(3):
            answer = ANSWER.decode(read_answer(mine) or b"")
            assert isinstance(answer, Opening)
            said.append(answer.at)
        mine.close()
        shown.say("no listener")
        return "open"

    monkeypatch.setattr(rank_process, "load", load)
    with theirs:
        channels, receiver = RankChannels(theirs, cast(Any, comm)), Receiver(1, theirs, None)
        found = rank_process._opened(RankSpec(str(tmp_path), 1, 2), channels, BEGIN, receiver)
        assert cast(Any, found) == "open" and said == ["reading", "after files", WAITS]
        reported: list[bytes] = []
        monkeypatch.setattr(receiver, "answer", reported.append)
        comm.work()
        assert not reported


def test_a_waiting_call_reports_until_the_late_rank_comes() -> None:
    ends, late = socket.socketpair(), threading.Event()
    comms = [LinkCommunicator(rank, {1 - rank: end}) for rank, end in enumerate(ends)]
    comms[0].at_wait(late.set)
    with closing(comms[0]), closing(comms[1]), ThreadPoolExecutor(1) as pool:
        first = pool.submit(comms[0].barrier)
        assert late.wait(SOON_S)
        comms[1].barrier()
        first.result()
