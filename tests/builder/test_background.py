"""Work of a build that runs next to its other stages: its end, its error, and its early end."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from threading import Event

import pytest

from spark_engine.builder import build as building
from spark_engine.builder.background import Work, in_background
from spark_engine.builder.clock import StageClock
from spark_engine.builder.plan.options import Options
from spark_engine.errors import CheckpointError, InternalError
from spark_engine.manifest import weights_name
from spark_engine.progress import Advance
from tests.repository import ROOT

Background = AbstractContextManager[Callable[[], None]]
SHOWN: list[tuple[int, int]] = []
STAGE = "write"
CHECKPOINT = ROOT / "models" / "tiny" / "checkpoint"


def background(work: Work, now: bool = True, fork: bool = False, stage: str = STAGE) -> Background:
    SHOWN.clear()
    clock = StageClock(lambda text: None, lambda done, total: SHOWN.append((done, total)))
    clock.start(stage, "")
    return in_background(work, clock, STAGE, now, fork)


@pytest.mark.parametrize("fork", [False, True])
def test_the_work_runs_during_the_block(fork: bool, tmp_path: Path) -> None:
    def work(advance: Advance, stop: Event) -> None:
        advance(1, 2)
        (tmp_path / "process").write_text(str(os.getpid()))
        advance(2, 2)

    with background(work, fork=fork) as ended:
        limit = time.monotonic() + 10
        while not (tmp_path / "process").exists() and time.monotonic() < limit:
            time.sleep(0.01)
        assert (tmp_path / "process").exists(), "before the block waits for it"
        ended()
    assert SHOWN == [(1, 2), (2, 2)]
    assert (int((tmp_path / "process").read_text()) != os.getpid()) == fork


def test_another_stage_shows_its_own_progress() -> None:
    with background(lambda advance, stop: advance(1, 2), stage="choose") as ended:
        ended()
    assert not SHOWN


def test_a_block_that_fails_ends_the_work_early() -> None:
    seen = list[bool]()
    with (
        pytest.raises(ValueError, match="no tactic"),
        background(lambda advance, stop: seen.append(stop.wait(10))),
    ):
        raise ValueError("no tactic")
    assert seen == [True]


def test_a_block_that_fails_ends_the_process(tmp_path: Path) -> None:
    def work(advance: Advance, stop: Event) -> None:
        stop.wait(60)
        (tmp_path / "late").touch()

    start = time.monotonic()
    with pytest.raises(ValueError, match="no tactic"), background(work, fork=True):
        raise ValueError("no tactic")
    assert time.monotonic() - start < 30 and not (tmp_path / "late").exists()


@pytest.mark.parametrize(("now", "fork"), [(True, False), (False, False), (True, True)])
def test_the_error_of_the_work_is_raised_at_its_end(now: bool, fork: bool) -> None:
    def work(advance: Advance, stop: Event) -> None:
        raise CheckpointError("no space")

    with pytest.raises(CheckpointError, match="no space"), background(work, now, fork) as ended:
        ended()


def test_a_process_that_is_killed_is_an_error() -> None:
    def work(advance: Advance, stop: Event) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(InternalError, match="exit code -9"), background(work, fork=True) as ended:
        ended()


def test_on_a_shared_memory_the_work_waits_for_the_other_stages() -> None:
    done = list[str]()
    with background(lambda advance, stop: done.append("weights"), now=False, fork=True) as ended:
        done.append("tactics")
        ended()
    assert done == ["tactics", "weights"]


def test_a_process_writes_the_weights_that_a_thread_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, digests = Options("cpu", decode=(1,), prefill=(64,), max_seqs=1), []
    for name, fork in (("thread", False), ("process", True)):
        here = partial(in_background, fork=fork)
        monkeypatch.setattr(building, "in_background", lambda *given, here=here, fork: here(*given))
        report = building.build(CHECKPOINT, tmp_path / name, options, lambda text: None)
        digests.append(report.manifest.files[weights_name(0, 1)])
        assert report.peak_anonymous > 0
    assert digests[0] == digests[1]
