"""Programs that share one memory hold a lock in turn: processes, a killed one, and two engines that
start at once."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from spark_engine.device import startup_lock as module
from spark_engine.device.startup_lock import startup_lock
from spark_engine.errors import CapacityError
from spark_engine.runtime.ranks import group
from tests.repository import ROOT

HOLDER = """
import sys, time
from pathlib import Path
from spark_engine.device.startup_lock import startup_lock
with startup_lock(True, print, maps=Path(sys.argv[1])):
    print("mine", flush=True)
    time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def maps(tmp_path: Path) -> Path:
    """/proc/self/maps of a process that has the driver's library loaded."""
    library = tmp_path / "lib dir" / "libcuda.so.580.95"
    library.parent.mkdir()
    library.write_text("a library")
    maps = tmp_path / "maps"
    lines = ["00400000-00452000 r-xp 00000000 08:02 173521 /usr/bin/python3", "7ffc0000 rw-p 0 "]
    maps.write_text("\n".join([*lines, f"7f00-7f01 r-xp 0 08:02 1234   {library}", ""]))
    return maps


@contextmanager
def holder(maps: Path, seconds: float) -> Iterator[subprocess.Popen[str]]:
    """Another process, which holds the lock."""
    command = [sys.executable, "-c", HOLDER, str(maps), str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "mine\n"
            yield process
        finally:
            process.kill()


def test_another_process_is_waited_for_and_said(maps: Path) -> None:
    said: list[str] = []
    with holder(maps, 1.0), startup_lock(True, said.append, maps=maps):
        pass
    first, last = said
    assert "waiting for it" in first and last.startswith("continued after ")


def test_what_is_not_shared_does_not_wait(maps: Path, tmp_path: Path) -> None:
    said: list[str] = []
    with holder(maps, 30.0), startup_lock(False, said.append, limit=0.0, maps=maps):
        assert not said
    maps.write_text("00400000-00452000 r-xp 00000000 08:02 173521 /usr/bin/python3\n")
    for without in (maps, tmp_path / "no such file"):  # no driver is loaded here
        with startup_lock(True, said.append, maps=without):
            assert not said


def test_one_that_is_killed_leaves_nothing(maps: Path) -> None:
    with holder(maps, 30.0) as other:
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
        with startup_lock(True, print, limit=5.0, maps=maps):
            pass


def test_one_that_never_ends_is_reported(maps: Path) -> None:
    library = maps.read_text().split("  ")[-1].strip()
    with holder(maps, 30.0), pytest.raises(CapacityError) as refused:
        with startup_lock(True, module.silent, limit=0.5, maps=maps):
            raise AssertionError("it is the other's turn")
    assert f"fuser {library}" in str(refused.value) and "start again" in str(refused.value)


def test_a_long_wait_is_said_again_and_again(maps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent rank is taken for one that hangs."""
    at, said = [0.0], list[str]()

    def sleep(seconds: float) -> None:
        at[0] += 10.0

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: at[0], sleep=sleep))
    with holder(maps, 60.0), pytest.raises(CapacityError):
        with startup_lock(True, said.append, limit=3.5 * module.REPORT_S, maps=maps):
            raise AssertionError("it is the other's turn")
    assert len(said) == 4 and module.REPORT_S < group.QUIET_S


def test_a_file_that_cannot_be_locked_stops_no_engine(maps: Path, tmp_path: Path) -> None:
    said: list[str] = []
    (library,) = (tmp_path / "lib dir").iterdir()
    library.unlink()  # an update of the driver has put another in its place
    with startup_lock(True, said.append, maps=maps):
        (words,) = said
    assert "cannot be locked (No such file" in words and "one engine at a time" in words


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("compat/libcuda.so.580.95", "this container's own driver library"),
        ("libcuda.so.580.95 (deleted)", "an update of the driver has replaced"),
        ("compatible/libcuda.so.1", ""),
    ],
)
def test_a_library_that_others_do_not_lock_is_reported(
    tmp_path: Path, name: str, words: str
) -> None:
    """A library with the same first letters is not the driver's."""
    library, maps, said = tmp_path / name.partition(" ")[0], tmp_path / "maps", list[str]()
    library.parent.mkdir(exist_ok=True)
    if "deleted" not in name:
        library.write_text("a library")
    other = "7f00-7f01 r-xp 0 08:02 12   /usr/lib/libcuda.so_tools/libcuda.sources"
    maps.write_text(f"{other}\n7f00-7f01 r-xp 0 08:02 1234   {tmp_path / name}\n")
    with startup_lock(True, said.append, maps=maps):
        pass
    if not words:
        assert not said
        return
    assert len(said) == 1 and words in said[0] and said[0].endswith("start one engine at a time")


ENGINE = """
import sys, time
from pathlib import Path
from spark_engine.device import startup_lock as turns
from spark_engine.errors import CapacityError
from spark_engine.runtime.engine import load as module
from spark_engine.runtime.executors import native
from spark_engine.progress import Progress
from tests.runtime import native_folder as toy
from tests.runtime.fake_gpu import FakeGpu

folder, maps, memory, total = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]

class Card(FakeGpu):  # of a memory that all processes share: a line for each allocation
    integrated, total_bytes = True, 64 << 30
    def __init__(self):
        super().__init__(toy.KERNELS)
    @property
    def free_bytes(self):
        free = int(total) - sum(map(int, memory.read_text().split()))
        time.sleep(0.5)  # so that another would have measured, too, before anything is taken
        return free
    def allocate(self, nbytes):
        with memory.open("a") as file:
            file.write(f"{nbytes}\\n")
        return super().allocate(nbytes)

native.Gpu = Card
module.runnable_targets = lambda hosts: ("cpu", toy.TARGET)
turns.MAPS = maps
print("begin", flush=True)
sys.stdin.readline()
try:
    module.load(folder, cache_bytes=0)
    print("open", flush=True)
except CapacityError as error:
    print(f"refused: {error}", flush=True)
"""


def test_the_second_of_two_engines_sees_what_the_first_has_taken(
    tmp_path: Path, maps: Path
) -> None:
    pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")
    from spark_engine.device.shared_memory import kept_of
    from spark_engine.engine_file import read_manifest
    from tests.runtime import native_folder as toy

    toy.write(tmp_path / "engine")
    need = read_manifest(tmp_path / "engine").memory.total
    memory = tmp_path / "memory"
    memory.write_text("")
    total = kept_of(64 << 30) + need * 3 // 2  # enough for one of them
    words = [str(tmp_path / "engine"), str(maps), str(memory), str(total)]
    both = [
        subprocess.Popen(
            [sys.executable, "-c", ENGINE, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for _ in range(2)
    ]
    for process in both:
        assert process.stdout is not None and process.stdout.readline() == "begin\n"
    for process in both:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    said = sorted(process.communicate(timeout=60)[0].strip() for process in both)
    assert said[0] == "open" and said[1].startswith("refused: "), said
    assert "GiB are free next to the 6.40 that this machine itself keeps" in said[1]
