"""Dumps: what both processes were doing when the engine hung or crashed.

Knows files, stacks and their format; decides nothing. On a request on standard input, a thread of
the engine process writes its stacks and its state. Where a call into a driver holds the GIL, a
signal (faulthandler) writes only the stacks. It reads frames without the GIL, so it is only safe
while no Python code runs; otherwise it may crash the process. The HTTP process writes both into one
file. No dump contains text or tokens.
"""

import asyncio
import contextlib
import faulthandler
import os
import platform
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from importlib.metadata import version
from io import FileIO
from pathlib import Path

import msgspec

STACKS, STATE = "stacks", "state"  # in the folder of the socket
ASK = b"d"  # on the engine process's standard input: requests a dump
KEPT = 10  # dumps of this user in a folder; older ones are deleted
NAME = "spark-dump-"
MOST_TASKS = 100
TRIES = 5  # at reading what another thread may change meanwhile
Describe = Callable[[], object]


class BlackBox:
    """The engine process's side. `folder` is its socket's; `describe` returns its state."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._stacks: FileIO | None = None
        self.describe: Describe = lambda: {"loading": True}

    def open(self) -> None:
        """From now on SIGUSR1 and fatal signals write the stacks. The file has its name only once
        the signal may be sent: before that, SIGUSR1 would end the process."""
        with contextlib.suppress(OSError):  # with a full disk there are no stacks
            part = self._folder / f"{STACKS}.part"
            self._stacks = part.open("ab", buffering=0)
            faulthandler.enable(self._stacks)
            faulthandler.register(signal.SIGUSR1, self._stacks)
            part.replace(self._folder / STACKS)

    def write(self) -> None:
        """The stacks of all threads, then the state. Raises nothing."""
        if self._stacks is not None:
            with contextlib.suppress(OSError):
                faulthandler.dump_traceback(self._stacks)
        self._write_state()

    def _write_state(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            part = self._folder / f"{STATE}.part"
            part.write_bytes(self._state())
            part.replace(self._folder / STATE)

    def write_error(self, error: BaseException) -> None:
        """Writes the traceback of a fatal error, and the state. Raises nothing."""
        with contextlib.suppress(OSError), (self._folder / STACKS).open("a") as file:
            traceback.print_exception(error, file=file)
        self._write_state()

    def _state(self) -> bytes:
        words = ""
        for _ in range(TRIES):
            try:
                return msgspec.json.encode(self.describe())
            except Exception as error:  # the loop may be in the middle of a step
                words = f"{type(error).__name__}: {error}"
        return msgspec.json.encode({"unreadable": words})


def read_black_box(folder: Path) -> dict[str, str]:
    """What the engine process wrote to `folder` since the last call, by name; it is removed."""
    found = {}
    for name in (STATE, STACKS):
        path = folder / name
        with contextlib.suppress(OSError):
            if text := path.read_text(errors="replace"):
                found[name] = text
            os.truncate(path, 0)  # the process keeps appending to this file
    return found


class Dumps:
    """The dumps of the HTTP process; folder None is the system's for temporary files."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path(tempfile.gettempdir())
        self._count = 0

    def write(self, words: str, engine: Mapping[str, str], server: object) -> Path:
        """One file: the reason, the engine process's dump, this process's state, stacks and tasks.

        Raises OSError where it cannot be written.
        """
        self._prune()
        self._count += 1
        stamp = time.strftime("%Y%m%d-%H%M%S")
        path = self._folder / f"{NAME}{stamp}-{os.getpid()}-{self._count}.txt"
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", errors="replace") as file:
            about = f"spark-engine {version('spark-engine')}, Python {platform.python_version()}"
            file.write(f"{words}\n{time.strftime('%Y-%m-%d %H:%M:%S %z')}, {about}\n")
            missing = "(none: it did not answer, something holds Python's lock or the disk is full)"
            for name in (STATE, STACKS):
                file.write(f"\n== engine process: {name} ==\n{engine.get(name) or missing}\n")
            state = msgspec.json.encode(server).decode()
            file.write(f"\n== HTTP process: state ==\n{state}\n\n== HTTP process: stacks ==\n")
            file.flush()
            faulthandler.dump_traceback(file)
            file.write("\n== HTTP process: tasks ==\n")
            for task in list(asyncio.all_tasks())[:MOST_TASKS]:
                task.print_stack(limit=12, file=file)
        return path

    def _prune(self) -> None:
        found = [(p.lstat(), p) for p in self._folder.glob(f"{NAME}*.txt")]
        mine = [(stat.st_mtime_ns, p) for stat, p in found if stat.st_uid == os.getuid()]
        for _, path in sorted(mine)[: 1 - KEPT]:
            path.unlink(missing_ok=True)
