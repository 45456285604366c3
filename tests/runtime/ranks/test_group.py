"""A group of scripted ranks: its time limits, and how it ends."""

import math
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from spark_engine.errors import CapacityError, ExecutorError
from spark_engine.interface import Limits
from spark_engine.runtime.engine import load
from spark_engine.runtime.engine.load import Loaded
from spark_engine.runtime.ranks import group as module
from spark_engine.runtime.ranks import messages, running_clock
from spark_engine.runtime.ranks.channel import HEAD, INLINE
from spark_engine.runtime.ranks.group import RankGroup
from spark_engine.runtime.server.engine_client.supervisor import WATCHDOG_S

SOON_S = 60.0  # ends a test that hangs
BEGIN = messages.Begin("", "", messages.LoadOptions(threads=1))


class NoCalls:
    """A communicator without calls."""

    limit_s = 0.0

    def abort(self, why: str) -> None:
        pass

    def close(self) -> None:
        pass


class Exits:
    """Records the codes of `os._exit`, which it replaces."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.came = threading.Event()

    def __call__(self, code: int) -> None:
        self.codes.append(code)
        self.came.set()


class Looks:
    """Counts how often a group has checked its ranks and its step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._count, self._changed = 0, threading.Condition()
        look = RankGroup._check_step

        def looked(group: RankGroup) -> None:
            look(group)
            with self._changed:
                self._count += 1
                self._changed.notify_all()

        monkeypatch.setattr(RankGroup, "_check_step", looked)

    def more(self, count: int) -> None:
        """Waits until so many checks have ended that started later; one may be running."""
        with self._changed:
            last = self._count + count + 1
            assert self._changed.wait_for(lambda: self._count >= last, SOON_S)


@contextmanager
def pair(
    processes: dict[int, subprocess.Popen[bytes]] | None = None,
) -> Iterator[tuple[RankGroup, socket.socket]]:
    """A group of two, and the end of rank 1."""
    mine, theirs = socket.socketpair()
    comm = cast(Any, NoCalls())
    with theirs, closing(RankGroup(comm, {1: mine}, processes or {})) as group:
        yield group, theirs


def fast(monkeypatch: pytest.MonkeyPatch, **limits: float) -> Exits:
    """Looks often, within these limits; records what would end this process."""
    ended = Exits()
    for name, seconds in {"TICK_S": 0.02, **limits}.items():
        monkeypatch.setattr(module, name, seconds)
    monkeypatch.setattr(os, "_exit", ended)
    return ended


def say(end: socket.socket, answer: messages.Answer) -> None:
    data = messages.encode(answer)
    end.sendall(HEAD.pack(len(data), INLINE) + data)


class Waiting:
    """A group of three ranks; the test advances its clock by seconds, each of which is checked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, undo: ExitStack) -> None:
        self._at, self._looks = 0.0, Looks(monkeypatch)
        clock = SimpleNamespace(monotonic=lambda: self._at)
        monkeypatch.setattr(running_clock, "time", clock)
        monkeypatch.setattr(module, "TICK_S", 0.01)
        monkeypatch.setattr(module, "QUIET_S", 5.0)
        pairs = {rank: socket.socketpair() for rank in (1, 2)}
        self.comm = NoCalls()
        controls = {rank: pair[0] for rank, pair in pairs.items()}
        self.group = undo.enter_context(closing(RankGroup(cast(Any, self.comm), controls, {})))
        self.ends = {rank: undo.enter_context(pair[1]) for rank, pair in pairs.items()}

    def second(self) -> None:
        self._looks.more(1)  # the answer is processed
        self._at += running_clock.MOST_S
        self._looks.more(1)


def test_a_rank_that_hangs_while_it_opens_is_named_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that waits for it and reports that is not named; no rank is, before all are asked to
    open."""
    with ExitStack() as undo:
        ranks = Waiting(monkeypatch, undo)
        for _ in range(20):
            ranks.second()
        ranks.group.begin(BEGIN, device=False)
        assert ranks.comm.limit_s == math.inf
        say(ranks.ends[1], messages.Opening("reading: 40 %"))
        for _ in range(5):
            say(ranks.ends[2], messages.Opening("waiting for other ranks"))
            ranks.second()
            ranks.group.check()
        say(ranks.ends[2], messages.Opening("waiting for other ranks"))
        ranks.second()
        with pytest.raises(ExecutorError, match=r"rank 1 \('reading: 40 %'\) .* for 5 s") as hung:
            ranks.group.all_open()
        assert "rank 2" not in str(hung.value)


def test_an_opening_may_take_long_and_an_open_rank_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ExitStack() as undo:
        ranks = Waiting(monkeypatch, undo)
        ranks.group.begin(BEGIN, device=False)
        say(ranks.ends[1], messages.Opened(4711))
        for percent in range(40):
            if percent % 4 == 0:
                say(ranks.ends[2], messages.Opening(f"reading: {percent} %"))
            ranks.second()
        say(ranks.ends[2], messages.Opened(4712))
        ranks.group.all_open()
        assert ranks.comm.limit_s == ranks.group.limit_s
        for _ in range(20):
            ranks.second()
        ranks.group.check()


def test_rank_0_leaves_a_step_that_hangs_before_the_watchdog_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The watchdog's end would name no rank."""
    assert module.DEVICE_S + module.GRACE_S + 2 * module.TICK_S < WATCHDOG_S
    ended = fast(monkeypatch, DEVICE_S=0.2, GRACE_S=0.2)
    with pair() as (group, _):
        group.waiting(True)
        assert ended.came.wait(SOON_S)
        group.waiting(False)
    assert set(ended.codes) == {module.EXIT_CODE}


def test_rank_0_leaves_an_opening_that_cannot_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example a library call that waits for a failed rank; rank 0 waits for nothing once all
    are open."""
    ended, looks = fast(monkeypatch, OPENING_S=0.1), Looks(monkeypatch)
    with pair() as (group, theirs):
        group.begin(BEGIN, device=True)
        theirs.close()
        assert ended.came.wait(SOON_S)
        assert set(ended.codes) == {module.EXIT_CODE}
        with pytest.raises(ExecutorError, match="rank 1 is gone"):
            group.all_open()
        looks.more(0)  # one check may have started before
        ended.codes.clear()
        looks.more(3)
        assert not ended.codes


def test_an_opening_that_is_slow_and_hangs_nowhere_ends_with_the_ranks_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exit code 70 is for a hang on a device; here no device waits for the failed rank."""
    ended, looks = fast(monkeypatch, OPENING_S=0.0), Looks(monkeypatch)
    with pair() as (group, theirs):
        group.begin(BEGIN, device=False)
        say(theirs, messages.RankFailed("too little memory", True, True))
        with group._changed:
            assert group._changed.wait_for(lambda: group._failure, SOON_S)
        looks.more(3)
        assert not ended.codes
        with pytest.raises(CapacityError, match="rank 1: too little memory"):
            group.check()


def test_a_rank_that_falls_ends_the_opening_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends at the next chunk or stage with the rank's own error, not when all is open."""
    fallen: list[CapacityError] = []
    seen: list[str] = []

    class Falling(NoCalls):
        comm, limit_s = NoCalls(), 1.0

        def begin(self, begin: messages.Begin, device: bool) -> None:
            assert device is (manifest.executor == load.NATIVE)

        def check(self) -> None:
            if fallen:
                raise fallen[0]

        def leave(self) -> None:
            seen.append("left")

        def close(self) -> None:
            seen.append("closed")

    def opened(path: Path, manifest: Any, options: Any, mark: Any, shown: Any, comm: Any) -> Any:
        steps: list[Callable[[], None]] = [
            lambda: mark("files"),
            lambda: shown.say("opening"),
            lambda: shown.advance(1, 2),
        ]
        for step in steps:
            step()  # no rank has failed yet
        fallen.append(CapacityError("rank 1: too little memory"))
        for step in steps:
            with pytest.raises(CapacityError, match="rank 1: too little memory"):
                step()
        shown.advance(2, 2)

    for executor in ("ort", load.NATIVE):
        manifest = SimpleNamespace(ranks=2, executor=executor)
        fallen.clear()
        seen.clear()
        monkeypatch.setattr(load, "read_manifest", lambda path, found=manifest: found)
        monkeypatch.setattr(load, "gather_ranks", lambda *_: Falling())
        monkeypatch.setattr(load, "begin_message", lambda *_: BEGIN)
        monkeypatch.setattr(load, "_load", opened)
        marks: list[str] = []
        with pytest.raises(CapacityError, match="rank 1: too little memory"):
            load.load(Path(), mark=marks.append)
        assert marks == ["files"] and seen == ["closed"]


@pytest.mark.parametrize("ready", [False, True])
def test_a_rank_that_is_not_ready_yet_is_not_waited_for(
    ready: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that opens its shard reads no packets; a rank that is open may close by itself."""
    monkeypatch.setattr(module, "KILLED_S", 0.02)
    monkeypatch.setattr(module, "EXIT_S", SOON_S)
    command = [sys.executable, "-Ic", f"import time; time.sleep({0.5 if ready else 30})"]
    process = subprocess.Popen(command)
    with pair({1: process}) as (group, _):
        if ready:
            group._opened.add(1)
    assert process.returncode == (0 if ready else -9)


def test_ranks_are_asked_to_close_before_rank_0_closes_its_part() -> None:
    """Each rank frees memory that others read after they unmapped it, so all close together."""
    done: list[str] = []

    class Noted:
        def __getattr__(self, name: str) -> Callable[[], None]:
            return lambda: done.append(name)

    part: Any = Noted()
    limits = Limits(1, 64, 1, 11, page_size=64, bias_slots=1, top_logprobs=1)
    Loaded(limits, (), (), (), {("decode", 1): part}, group=part).close()
    assert done == ["leave", "close", "close"]
    with pair() as (group, _):
        (control,) = group._controls.values()
        group._opened.add(1)
        group.leave()
        assert not group.check() and control.fileno() >= 0, "its end is not processed yet"
    assert control.fileno() < 0
