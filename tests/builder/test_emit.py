"""Staging: a build that fails or dies leaves the old engine or none."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest

from spark_engine.builder import emit
from spark_engine.device.shared_memory import HostBudget
from spark_engine.engine_file import open_folder, verify_files
from spark_engine.errors import CapacityError, EngineError, OptionError
from spark_engine.tensors import DType, TensorSpec
from spark_engine.typed import MOST
from spark_engine.weights_file import COPIES, IN_FLIGHT, plan_weights
from tests.spark_engine.test_engine_file import example, write_folder


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


def test_a_swap_that_fails_leaves_the_old_engine_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dest = old_engine(tmp_path / "toy")
    emit.seal(dest, example(dest))
    rename = os.rename

    def fails(source: Path, target: Path) -> None:
        if source.name == ".toy.staging":
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(OSError, match="toy"), emit.locked(dest), emit.staging(dest) as folder:
        (folder / "mark").write_text("new")
    assert (dest / "mark").read_text() == "old" and open_folder(dest, "cpu")
    assert [p.name for p in tmp_path.iterdir()] == ["toy"]


def test_the_old_engine_is_whole_until_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies at the second rename; the next build restores the old engine."""
    dest = old_engine(tmp_path / "toy")
    emit.seal(dest, example(dest))
    rename, left = os.rename, []

    def dies(source: Path, target: Path) -> None:
        if source.name == ".toy.staging":
            shutil.copytree(tmp_path, tmp_path.parent / "left")  # as the disk is in that moment
            left.append(tmp_path.parent / "left")
        rename(source, target)

    monkeypatch.setattr(os, "rename", dies)
    with emit.locked(dest), emit.staging(dest) as folder:
        (folder / "mark").write_text("new")
    monkeypatch.undo()
    again = left[0] / "toy"
    with emit.locked(again):
        assert (again / "mark").read_text() == "old" and open_folder(again, "cpu")
    shutil.rmtree(left[0])


def test_everything_is_on_disk_before_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dest, events = tmp_path / "toy", []
    fsync, rename = os.fsync, os.rename

    def synced(handle: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def renamed(source: Path, target: Path) -> None:
        events.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    with emit.locked(dest), emit.staging(dest) as folder:
        (folder / "sub").mkdir()
        for name in ("mark", "sub/more"):
            (folder / name).write_text("new")
        staged = {folder, folder / "sub", folder / "mark", folder / "sub" / "more"}
    at = events.index("rename")
    assert set(events[:at]) == staged and events[at + 1 :] == [tmp_path]


def test_a_write_that_fails_names_the_folder(tmp_path: Path) -> None:
    dest = tmp_path / "toy"
    with pytest.raises(OSError) as full, emit.locked(dest), emit.staging(dest):
        raise OSError(28, "No space left on device")
    assert full.value.filename == str(dest)
    assert list(tmp_path.iterdir()) == []


def test_space_is_looked_at_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emit.check_space(tmp_path / "toy", 1)
    free = os.statvfs(tmp_path)
    with pytest.raises(OptionError) as short:
        emit.check_space(tmp_path / "toy", (free.f_bavail + (1 << 30)) * free.f_frsize)
    for words in (str(tmp_path / "toy"), "TiB", "are free in", "another disk"):
        assert words in str(short.value)


@pytest.mark.parametrize("name", [".", "..", "/"])
def test_a_folder_without_a_name_is_refused(name: str) -> None:
    with pytest.raises(OptionError), emit.locked(Path(name)):
        pass


def test_a_folder_that_cannot_be_written_is_said() -> None:
    with pytest.raises(OptionError, match="-o /proc/x: /proc cannot be written"):
        with emit.locked(Path("/proc/x")):
            pass


@pytest.mark.parametrize(
    ("left", "found"),
    [
        ((".toy.staging",), None),
        ((".toy.old",), ".toy.old"),  # between the renames
        ((".toy.old", "toy"), "toy"),  # after them
    ],
)
def test_what_a_dead_build_left_is_cleared(
    tmp_path: Path, left: tuple[str, ...], found: str | None
) -> None:
    for name in left:
        old_engine(tmp_path / name, name)
    with emit.locked(tmp_path / "toy"):
        assert {p.name for p in tmp_path.iterdir()} == {".toy.lock"} | ({"toy"} if found else set())
        assert not found or (tmp_path / "toy" / "mark").read_text() == found


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


def test_what_no_runtime_reads_is_not_sealed(tmp_path: Path) -> None:
    """Each option may be possible, and together they may not be."""
    folder = write_folder(tmp_path / "toy")
    one = example(folder)
    large = replace(one, buckets=(replace(one.buckets[0], buffer_bytes=MOST + 1),))
    with pytest.raises(EngineError, match="buffer_bytes is .*; give smaller sizes"):
        emit.seal(folder, large)


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


def test_a_waiter_gets_the_lock_that_others_wait_for_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder removes the file: a lock on a removed file would exclude no other process."""
    dest, lock, flock, waits = tmp_path / "toy", tmp_path / ".toy.lock", fcntl.flock, []

    def waited(file: IO[str], how: int) -> None:
        flock(file, how)
        waits.append(1)
        if len(waits) == 1:
            lock.unlink()  # as its holder does before we get it
        if len(waits) == 2:
            lock.unlink()
            lock.touch()  # and a third has made another

    monkeypatch.setattr(fcntl, "flock", waited)
    with emit.locked(dest), lock.open() as other, pytest.raises(BlockingIOError):
        flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert len(waits) == 3 and list(tmp_path.iterdir()) == []


def test_weights_in_work_take_half_of_what_is_free() -> None:
    """Less than the largest tensor's copies is too little; more than a bound is never taken."""
    specs = [TensorSpec("small", DType.U8, (10,)), TensorSpec("large", DType.U8, (1 << 20,))]
    layout, need = plan_weights(specs), COPIES << 20
    found = {
        free: emit.weights_in_work(layout, HostBudget(free, 4 << 30, True))
        for free in (need, 3 * need, 5 * IN_FLIGHT)
    }
    assert found == {need: need, 3 * need: 3 * need // 2, 5 * IN_FLIGHT: IN_FLIGHT}
    assert emit.weights_in_work(layout, HostBudget(None, 0, False)) == IN_FLIGHT
    words = (
        r"weight large takes 3\.00 MiB .* 3\.00 MiB .* free in addition to 4\.00 GiB .*: stop other"
    )
    with pytest.raises(CapacityError, match=words):
        emit.weights_in_work(layout, HostBudget(need - 1, 4 << 30, True))
