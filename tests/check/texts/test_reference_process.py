"""Texts of references, read by another process."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from spark_engine.builder.build import build
from spark_engine.builder.plan.options import Options
from spark_engine.check.engines.open_engines import folder_of, open_by_reference
from spark_engine.check.engines.prompts import CheckSession, greedy_session
from spark_engine.check.texts import reference_process
from spark_engine.check.texts.text import read_texts
from spark_engine.runtime.engine.load import Loaded
from tests.checkpoints import write_checkpoint

OPTIONS = Options(decode=(2,), prefill=(64,), max_context=70, max_seqs=2, kv_dtype="f32")
ROWS = 2
Made = tuple[Loaded, CheckSession]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("engine")
    write_checkpoint(folder / "checkpoint")
    build(folder / "checkpoint", folder / "engine", OPTIONS, lambda text: None)
    reference = open_by_reference(folder / "engine")
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    return reference, greedy_session(reference.limits, [*reference.executors], 0, prompts)


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_process.os, "sched_getaffinity", lambda pid: {0, 1})


def path_of(made: Made) -> Path:
    return folder_of(made[0]).path


def refuse_to_read(reference: Loaded, session: CheckSession, rows: int) -> None:
    raise AssertionError("read in this process")


def test_the_process_says_what_this_one_would(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    want = [*read_texts(*made, ROWS)]
    monkeypatch.setattr(reference_process, "read_texts", refuse_to_read)
    with reference_process.texts_in_process(made[0], path_of(made), made[1], ROWS, print) as truths:
        got = [*truths()]
    assert len(got) == len(want) > 20
    for one, other in zip(got, want, strict=True):
        assert np.array_equal(one, other)
    assert not multiprocessing.active_children()


def test_one_core_or_no_folder_reads_here(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    with reference_process.texts_in_process(made[0], None, made[1], ROWS, print) as truths:
        assert not multiprocessing.active_children() and len([*truths()]) > 20
    monkeypatch.setattr(reference_process.os, "sched_getaffinity", lambda pid: {0})
    with reference_process.texts_in_process(made[0], path_of(made), made[1], ROWS, print) as truths:
        assert not multiprocessing.active_children() and len([*truths()]) > 20


def test_a_killed_process_loses_nothing(made: Made) -> None:
    said: list[str] = []
    with reference_process.texts_in_process(
        made[0], path_of(made), made[1], ROWS, said.append
    ) as got:
        for child in multiprocessing.active_children():
            os.kill(child.pid or 0, signal.SIGKILL)
        assert len([*got()]) > 20
    assert [text for text in said if "was killed" in text]


def test_an_error_elsewhere_ends_the_process_at_once(made: Made) -> None:
    start = time.monotonic()
    with (
        pytest.raises(ZeroDivisionError),
        reference_process.texts_in_process(made[0], path_of(made), made[1], ROWS, print),
    ):
        assert multiprocessing.active_children()
        raise ZeroDivisionError
    assert not multiprocessing.active_children() and time.monotonic() - start < 60
