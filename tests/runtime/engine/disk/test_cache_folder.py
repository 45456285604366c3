"""The folder: its bound, its files, and all that may be wrong with them."""

import errno
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from spark_engine.errors import OptionError
from spark_engine.runtime.engine.disk import cache_folder
from spark_engine.runtime.engine.disk.cache_folder import (
    BLOCK,
    LOCK,
    NODE,
    TEMPORARY,
    CacheFolder,
    page_file,
    state_file,
)

SIZE = 5000  # bytes of a file's content
TAKES = 2 * BLOCK


@contextmanager
def opened(path: Path, most: int = 1 << 20) -> Iterator[CacheFolder]:
    folder = CacheFolder(path, most)
    yield folder
    folder.close()


def name(number: int) -> str:
    return page_file(number.to_bytes(NODE, "little"))


def content(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, SIZE, np.uint8)


def put(folder: CacheFolder, *numbers: int) -> None:
    for number in numbers:
        both = content(number)
        folder.put(name(number), [both[:10], both[10:]])
    folder.flush(10)


def read(folder: CacheFolder, number: int) -> bool:
    """Whether the file is read; if so it is what was written."""
    data = folder.read(name(number), SIZE, 0).result(10)
    assert data is None or bytes(data) == content(number).tobytes()
    return data is not None


def test_files_outlive_their_process_and_are_this_users_alone(tmp_path: Path) -> None:
    path = tmp_path / "made" / "here"
    with opened(path) as folder:
        put(folder, 1, 2)
        node = bytes(NODE)
        folder.put(state_file(node, 3, bytes(16)), [content(3)])
        folder.flush(10)
        assert read(folder, 1)
    modes = {file.name: oct(file.stat().st_mode & 0o777) for file in path.iterdir()}
    assert oct(path.stat().st_mode & 0o777) == "0o700" and {*modes.values()} == {"0o600"}
    with opened(path) as folder:
        assert read(folder, 1) and read(folder, 2) and not folder.has(name(3))
        assert folder.states_at(node) == [(3, state_file(node, 3, bytes(16)))]
        assert folder.used == 3 * TAKES and folder.refused == 0
        folder.discard([state_file(node, 3, bytes(16))])
        folder.flush(10)
        assert folder.states_at(node) == [] and folder.used == 2 * TAKES


def _flip(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def _tear(file: Path, rng: random.Random) -> None:
    """Blocks that a power failure left empty."""
    data, at = bytearray(file.read_bytes()), rng.randrange(SIZE)
    data[at:] = bytes(len(data) - at)
    file.write_bytes(data)


def _link(file: Path, rng: random.Random) -> None:
    file.rename(file.with_suffix(".moved"))
    file.symlink_to(file.with_suffix(".moved"))


def _pipe(file: Path, rng: random.Random) -> None:
    file.unlink()
    os.mkfifo(file)


DAMAGE: dict[str, Callable[[Path, random.Random], object]] = {
    "flip": _flip,
    "cut": lambda file, rng: os.truncate(file, rng.randrange(file.stat().st_size)),
    "lengthen": lambda file, rng: file.write_bytes(file.read_bytes() + rng.randbytes(9)),
    "tear": _tear,
    "replace": lambda file, rng: file.write_bytes((file.parent / name(99)).read_bytes()),
    "foreign": lambda file, rng: file.write_bytes(rng.randbytes(file.stat().st_size)),
    "link": _link,
    "pipe": _pipe,
    "remove": lambda file, rng: file.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_not_as_it_was_written_is_refused_and_removed(damage: str, tmp_path: Path) -> None:
    """Found at the start or while it is open; each of 12 random places."""
    rng = random.Random(damage)
    with opened(tmp_path) as folder:
        put(folder, *range(12), 99)
    for number in range(12):
        if number % 2:
            DAMAGE[damage](tmp_path / name(number), rng)
        with opened(tmp_path) as folder:
            if not number % 2:
                DAMAGE[damage](tmp_path / name(number), rng)
            known = folder.readable(name(number))
            assert not read(folder, number) and folder.refused == 1
            assert not folder.has(name(number)) and read(folder, 99)
            assert known or damage in ("link", "pipe", "remove")
            assert not os.path.lexists(tmp_path / name(number))
            put(folder, number)
            assert read(folder, number)


def test_half_written_files_go_and_others_names_stay(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        put(folder, 1)
    (tmp_path / TEMPORARY).write_bytes(b"half")
    for other in ("notes.txt", "abc.page", name(1).upper(), name(1) + ".old"):
        (tmp_path / other).write_bytes(b"mine")
    with opened(tmp_path, TAKES) as folder:
        assert not (tmp_path / TEMPORARY).exists() and folder.used == TAKES
        put(folder, 2)
        assert {*os.listdir(tmp_path)} - {"notes.txt", "abc.page"} == {
            *(name(1).upper(), name(1) + ".old", name(2), LOCK)
        }


def test_the_least_recently_used_files_are_removed(tmp_path: Path) -> None:
    with opened(tmp_path, 4 * TAKES) as folder:
        put(folder, 0, 1, 2, 3)
        folder.touch([name(2), name(0), name(77)])
        put(folder, 4)
        assert [folder.has(name(i)) for i in range(5)] == [True, False, True, True, True]
        put(folder, 5)
        assert not folder.has(name(3)) and folder.evicted == 2
        folder.put(name(6), [np.zeros(5 * TAKES, np.uint8)])  # more than all
        folder.flush(10)
        assert folder.used == 4 * TAKES and not folder.has(name(6)) and folder.queued == 0
    with opened(tmp_path, 2 * TAKES) as folder:  # the order is known after a restart
        assert [i for i in range(6) if folder.has(name(i))] == [4, 5] and folder.evicted == 2
        assert sum(file.stat().st_size for file in tmp_path.glob("*.page")) <= 2 * TAKES


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EDQUOT, errno.EIO])
def test_the_first_error_of_a_write_ends_all_writing(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as folder:
        put(folder, 1)

        def fail(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(cache_folder.os, "replace", fail)
        put(folder, 2, 3, 4)
        monkeypatch.undo()
        put(folder, 5)
        assert read(folder, 1) and not any(folder.has(name(i)) for i in (2, 3, 4, 5))
        assert os.strerror(number) in folder.failed and len(caplog.records) == 1
        assert {*os.listdir(tmp_path)} == {LOCK, name(1)} and folder.queued == 0


def test_one_thread_writes_and_it_is_not_the_callers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, inner = set[str](), cache_folder.write_file

    def write(*arguments: object) -> None:
        threads.add(threading.current_thread().name)
        inner(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(cache_folder, "write_file", write)
    with opened(tmp_path) as folder:
        put(folder, *range(5))
    assert len(threads) == 1 and threading.current_thread().name not in threads


def test_a_folder_has_one_process_at_a_time(tmp_path: Path) -> None:
    code = "import sys, time; from pathlib import Path; from spark_engine.runtime.engine.disk."
    code += "cache_folder import *; f = CacheFolder(Path(sys.argv[1]), 9999); print('open', "
    code += "flush=True); time.sleep(60)"
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "open\n"
        with pytest.raises(OptionError, match="another engine uses it: give each its own folder"):
            CacheFolder(tmp_path, 1 << 20)
        other.kill()
        other.wait()
    with opened(tmp_path) as folder:
        put(folder, 1)
        assert read(folder, 1)
        with pytest.raises(OptionError, match="another engine uses it"):
            CacheFolder(tmp_path, 1 << 20)


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    for path, words in (
        (tmp_path / "file", "File exists: name a folder that this user may write"),
        (tmp_path / "file" / "below", "Not a directory: name a folder"),
        (shared, "other users may write in it: name a folder of this user, with chmod 700"),
    ):
        with pytest.raises(OptionError, match=words):
            CacheFolder(path, 1 << 20)
