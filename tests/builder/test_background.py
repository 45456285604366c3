"""Work of a build that runs next to its other stages: its end, its error, and its early end."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path

import pytest

from spark_engine.builder import build as building
from spark_engine.builder.background import Work, in_background
from spark_engine.builder.clock import StageClock
from spark_engine.builder.plan.options import Options
from spark_engine.errors import CheckpointError, InternalError
from spark_engine.manifest import weights_name
from tests.repository import ROOT

CHECKPOINT = ROOT / "models" / "tiny" / "checkpoint"
SHOWN: list[tuple[int, int]] = []


def background(work: Work, fork: bool) -> AbstractContextManager[Callable[[], None]]:
    SHOWN.clear()
    clock = StageClock(lambda text: None, lambda done, total: SHOWN.append((done, total)))
    return in_background(work, clock, fork)


def appears(path: Path) -> bool:
    return any(path.exists() or time.sleep(0.01) for _ in range(2000))


def test_the_work_runs_during_the_block_and_its_progress_is_shown(tmp_path: Path) -> None:
    started, waits = tmp_path / "started", tmp_path / "waits"

    def work(clock: StageClock) -> None:
        clock.advance(1, 2)
        started.touch()
        appears(waits)
        time.sleep(1)

    with background(work, fork=True) as ended:
        assert appears(started) and not SHOWN, "another stage shows its own progress"
        waits.touch()
        ended()
    assert set(SHOWN) == {(1, 2)}


@pytest.mark.parametrize("killed", [False, True])
def test_the_work_ends_with_the_build(tmp_path: Path, killed: bool) -> None:
    """After an error, and after a signal that nothing in the build hears."""
    started, ends = tmp_path / "started", tmp_path / "ends"

    def work(clock: StageClock) -> None:
        started.touch()
        with suppress(InterruptedError):
            for _ in range(600):
                clock.advance(1, 2)
                time.sleep(0.1)
        ends.touch()

    def build() -> None:
        with background(work, fork=True):
            assert appears(started)
            os.kill(os.getpid(), signal.SIGKILL * killed)
            raise ValueError("no tactic")

    process = multiprocessing.get_context("fork").Process(target=build)
    process.start()
    process.join(40)
    assert process.exitcode == (-signal.SIGKILL if killed else 1)
    assert (appears(ends) if killed else ends.exists()) == killed


@pytest.mark.parametrize(("fork", "killed"), [(False, False), (True, False), (True, True)])
def test_the_error_of_the_work_is_raised_at_its_end(fork: bool, killed: bool) -> None:
    def work(clock: StageClock) -> None:
        os.kill(os.getpid(), signal.SIGKILL * killed)
        raise CheckpointError("no space")

    error = InternalError if killed else CheckpointError
    with pytest.raises(error, match="killed|no space"), background(work, fork) as ended:
        ended()


def test_on_a_shared_memory_the_work_waits_for_the_other_stages() -> None:
    done = list[str]()
    with background(lambda clock: done.append("weights"), fork=False) as ended:
        done.append("tactics")
        ended()
    assert done == ["tactics", "weights"]


def test_a_process_writes_the_weights_that_this_one_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, digests = Options("cpu", decode=(1,), prefill=(64,), max_seqs=1), set[str]()
    for fork in (False, True):
        here = partial(in_background, fork=fork)
        monkeypatch.setattr(building, "in_background", lambda *given, here=here: here(*given[:2]))
        report = building.build(CHECKPOINT, tmp_path / f"{fork}", options, lambda text: None)
        digests.add(report.manifest.files[weights_name(0, 1)])
        assert 0 < report.peak_anonymous < report.peak_rss
    assert len(digests) == 1
