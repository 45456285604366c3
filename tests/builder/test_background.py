"""Work of a build that runs next to its other stages: its end, its error, and its early end."""

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
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
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a process is forked on Linux only")


def background(work: Work, fork: bool) -> AbstractContextManager[Callable[[], None]]:
    SHOWN.clear()
    clock = StageClock(lambda text: None, lambda done, total: SHOWN.append((done, total)))
    return in_background(work, clock, fork)


def appears(path: Path) -> bool:
    limit = time.monotonic() + 20
    while not path.exists() and time.monotonic() < limit:
        time.sleep(0.01)
    return path.exists()


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


def test_a_block_that_fails_ends_the_work_early(tmp_path: Path) -> None:
    started, process = tmp_path / "started", tmp_path / "process"

    def work(clock: StageClock) -> None:
        process.write_text(str(os.getpid()))
        started.touch()
        time.sleep(60)

    begin = time.monotonic()
    with pytest.raises(ValueError, match="no tactic"), background(work, fork=True):
        assert appears(started)
        raise ValueError("no tactic")
    assert time.monotonic() - begin < 40
    with pytest.raises(ProcessLookupError):
        os.kill(int(process.read_text()), 0)


@pytest.mark.parametrize("fork", [True, False])
def test_the_error_of_the_work_is_raised_at_its_end(fork: bool) -> None:
    def work(clock: StageClock) -> None:
        raise CheckpointError("no space")

    with pytest.raises(CheckpointError, match="no space"), background(work, fork) as ended:
        ended()


def test_a_process_that_is_killed_is_an_error() -> None:
    def work(clock: StageClock) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(InternalError, match="was killed"), background(work, fork=True) as ended:
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
    options, digests = Options("cpu", decode=(1,), prefill=(64,), max_seqs=1), []
    for name, fork in (("own", False), ("forked", True)):
        here = partial(in_background, fork=fork)
        monkeypatch.setattr(
            building, "in_background", lambda work, clock, _, here=here: here(work, clock)
        )
        report = building.build(CHECKPOINT, tmp_path / name, options, lambda text: None)
        digests.append(report.manifest.files[weights_name(0, 1)])
        assert 0 < report.peak_anonymous < report.peak_rss
    assert digests[0] == digests[1]
