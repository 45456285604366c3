"""Staging: a build that fails or dies leaves the old engine or none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from spark_engine.builder import emit
from spark_engine.engine_file import open_folder, verify_files
from spark_engine.errors import OptionError
from tests.test_engine_file import example, write_folder


def old_engine(path: Path, text: str = "old") -> Path:
    write_folder(path)
    (path / "mark").write_text(text)
    return path


def test_a_good_block_replaces_the_old(tmp_path: Path) -> None:
    dest = old_engine(tmp_path / "toy")
    with emit.locked(dest), emit.staging(dest) as folder:
        (folder / "mark").write_text("new")
        assert (dest / "mark").read_text() == "old"
    assert (dest / "mark").read_text() == "new"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["toy"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failed_block_leaves_the_old(tmp_path: Path, error: type[BaseException]) -> None:
    dest = old_engine(tmp_path / "toy")
    with pytest.raises(error), emit.locked(dest), emit.staging(dest) as folder:
        (folder / "mark").write_text("half")
        raise error
    assert (dest / "mark").read_text() == "old"
    assert not (tmp_path / ".toy.staging").exists()


def test_what_a_dead_build_left_is_cleared(tmp_path: Path) -> None:
    dest = tmp_path / "toy"
    (tmp_path / ".toy.staging").mkdir()
    (tmp_path / ".toy.staging" / "weights.safetensors").write_text("half")
    with emit.locked(dest):
        assert not (tmp_path / ".toy.staging").exists() and not dest.exists()


def test_a_death_between_the_renames_brings_the_old_back(tmp_path: Path) -> None:
    old_engine(tmp_path / ".toy.old")
    with emit.locked(tmp_path / "toy"):
        assert (tmp_path / "toy" / "mark").read_text() == "old"
    assert not (tmp_path / ".toy.old").exists()


def test_a_death_after_the_renames_keeps_the_new(tmp_path: Path) -> None:
    old_engine(tmp_path / ".toy.old")
    old_engine(tmp_path / "toy", "new")
    with emit.locked(tmp_path / "toy"):
        assert (tmp_path / "toy" / "mark").read_text() == "new"
    assert not (tmp_path / ".toy.old").exists()


def test_foreign_folders_and_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_text("x")
    (tmp_path / "file").write_text("x")
    for name in ("photos", "file"):
        with pytest.raises(OptionError, match="not an engine folder"), emit.locked(tmp_path / name):
            pass
    (tmp_path / "empty").mkdir()
    with emit.locked(tmp_path / "empty"), emit.staging(tmp_path / "empty") as folder:
        (folder / "x").touch()
    assert (tmp_path / "empty" / "x").exists()


def test_seal_digests_every_file(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "toy")
    (folder / "tokenizer" / "more.json").write_text("[1]")
    sealed = emit.seal(folder, example(folder))
    assert "tokenizer/more.json" in sealed.files and "manifest.json" not in sealed.files
    verify_files(folder, sealed.files)
    assert open_folder(folder, "cpu").manifest == sealed


HOLD = """
import sys, time
from pathlib import Path
from spark_engine.builder import emit
dest = Path(sys.argv[1])
with emit.locked(dest), emit.staging(dest) as folder:
    (folder / "half").write_text("x")
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_lock_waits_and_is_freed_by_death(tmp_path: Path) -> None:
    dest = tmp_path / "toy"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(dest)], stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    waiter = subprocess.Popen([sys.executable, "-c", HOLD, str(dest)], stdout=subprocess.PIPE)
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    assert waiter.stdout is not None and waiter.stdout.readline() == b"held\n"
    assert (tmp_path / ".toy.staging" / "half").exists() and not dest.exists()
    waiter.kill()
    waiter.wait()
    waiter.stdout.close()
