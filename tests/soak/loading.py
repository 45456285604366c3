"""What starting an engine takes beyond its plan, under a limit of memory that counts all of it.

`python -m tests.soak.loading GIB [FOLDER]` writes an engine of so many GiB of weights under FOLDER
and starts it, from its folder to its graphs, on a GPU of numpy that shares the host's memory, as a
GB10 does: in a control group (a cgroup, version 1 or 2) limited to the plan and 2 GiB. The
kernel kills a process that takes more; page cache counts. It wants root, or a group above that may
be written. `tests/device/test_unified_memory.py` does the same with little.
"""

import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spark_engine.engine_file import WEIGHTS, read_manifest
from spark_engine.runtime.engine import load as module
from spark_engine.runtime.executors import native
from spark_engine.tensors import DType, TensorSpec
from tests.runtime import native_folder as toy
from tests.runtime.fake_gpu import FakeGpu

ROOT = Path(__file__).parents[2]
GROUPS = Path("/sys/fs/cgroup")
GIB = 1 << 30
BEYOND = 2 * GIB  # what loading may take in addition to the plan


class Card(FakeGpu):
    """A GPU of numpy in a memory that the host has too."""

    integrated, free_bytes, total_bytes = True, 100 * GIB, 119 * GIB

    def __init__(self) -> None:
        super().__init__(toy.KERNELS)


@dataclass(frozen=True)
class Group:
    """A control group's files: of the processes in it, its limit, and the most that it took."""

    folder: Path
    limit: Path
    peak: Path


@contextmanager
def group() -> Iterator[Group | None]:
    """A new one without a limit, or None where none can be made."""
    one, two = GROUPS / "memory", GROUPS
    base, limit, peak = (
        (one, "memory.limit_in_bytes", "memory.max_usage_in_bytes")
        if (one / "memory.limit_in_bytes").exists()
        else (two, "memory.max", "memory.peak")
    )
    folder = base / f"spark-loading-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError:
        yield None
        return
    try:
        whole = all((folder / name).exists() for name in (limit, peak))
        yield Group(folder, folder / limit, folder / peak) if whole else None
    finally:
        folder.rmdir()


def _limit(held: Group, nbytes: int) -> None:
    """Of memory alone: what went to swap would not count."""
    held.limit.write_text(str(nbytes))
    for name in ("memory.swappiness", "memory.swap.max"):  # of version 1, of 2
        if (held.folder / name).exists():
            (held.folder / name).write_text("0")


@dataclass(frozen=True)
class Start:
    """Bytes: the plan of the engine, what its process took beyond (VmHWM, without what it had), and
    the peak beyond of its control group, page cache included; None without one."""

    plan: int
    process: int
    group: int | None


def write(folder: Path, nbytes: int) -> None:
    """The folder of an engine with so many bytes of weights, dropped from the page cache."""
    _alone("write", folder, str(nbytes))
    with (folder / WEIGHTS).open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def start(folder: Path, beyond: int = BEYOND) -> Start:
    """Starts the engine in a process that may take so many bytes beyond the plan: by its control
    group, or, where there is none, by its own allocations. Raises MemoryError where that is not
    enough."""
    plan = read_manifest(folder).memory.total
    with group() as held:
        if held:
            _limit(held, plan + beyond)
        found = _alone("start", folder, str(beyond), str(held.folder) if held else "")
        return Start(plan, int(found), int(held.peak.read_text()) - plan if held else None)


def _alone(*words: str | Path) -> str:
    command = [sys.executable, "-m", "tests.soak.loading", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode == -signal.SIGKILL:
        raise MemoryError(f"{words[0]}: killed at the limit of its control group")
    if "MemoryError" in done.stderr:
        raise MemoryError(f"{words[0]}: {done.stderr[-300:]}")
    if done.returncode:
        raise RuntimeError(f"{words[0]} ended with code {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def _write(folder: Path, nbytes: int) -> None:
    toy.W = TensorSpec("w", DType.F32, (nbytes // 4,))
    toy.write(folder, _touching_little)


def _touching_little(rows: int) -> Mapping[str, Any]:
    """A bucket's launches; a kernel gets a size as an i32, and these weights are larger."""
    body = toy.body(rows)
    body["operands"][body["operands"].index(["weight", "w"]) + 1] = ["i32", 64]
    return body


def _start(folder: Path, beyond: int, held: str) -> None:
    native.Gpu = Card  # type: ignore[misc, assignment]
    module.runnable_targets = lambda hosts: ("cpu", toy.TARGET)
    before = status("VmRSS")
    plan = read_manifest(folder).memory.total
    if held:  # what is taken from here on counts
        (Path(held) / "cgroup.procs").write_text(str(os.getpid()))
    else:
        most = status("VmData") + plan + beyond
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    module.load(folder, cache_bytes=0)
    print(status("VmHWM") - before - plan)


def status(word: str) -> int:
    """Bytes, of this process; getrusage would count the process that started it."""
    rows = Path("/proc/self/status").read_text().splitlines()
    return int(next(row for row in rows if row.startswith(word + ":")).split()[1]) << 10


def main(words: list[str]) -> None:
    if words[0] == "write":
        _write(Path(words[1]), int(words[2]))
    elif words[0] == "start":
        _start(Path(words[1]), int(words[2]), words[3])
    else:
        with tempfile.TemporaryDirectory(dir=words[1] if len(words) > 1 else None) as folder:
            write(Path(folder), int(float(words[0]) * GIB))
            found = start(Path(folder))
        if found.group is None:
            sys.exit("no control group can be made here: as root, with cgroups mounted")
        rows = {"the plan": found.plan, "beyond it, the process": found.process}
        rows |= {"beyond it, the control group": found.group, "its limit beyond": BEYOND}
        for name, nbytes in rows.items():
            print(f"{name:30} {nbytes / GIB:8.3f} GiB")


if __name__ == "__main__":
    main(sys.argv[1:])
