"""One command as a process: its output in a file, its time limited, and nothing of it left behind.

Knows processes and no stage. A command is ended with its process group, and with whatever else
carries its mark in the environment: a server in a session of its own would go on using the GPU.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

MARK = "SPARK_STAGE"
GRACE = 3.0  # seconds between being asked to end and being ended
PROC = Path("/proc")


class Job:
    """A command that runs, from its start on. `output` gets what it says; `stdout`, where it is
    given, gets its standard output instead."""

    def __init__(
        self,
        words: Sequence[str],
        output: Path,
        environment: Mapping[str, str],
        limit: float,
        folder: Path,
        stdout: Path | None = None,
    ) -> None:
        self.words, self.limit = words, limit
        self.began = time.monotonic()
        self._mark = uuid.uuid4().hex
        self.code: int | None = None
        with ExitStack() as files:
            file = files.enter_context(output.open("wb"))
            out = files.enter_context(stdout.open("wb")) if stdout is not None else file
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=out, stderr=file,
                env={**environment, MARK: self._mark}, cwd=folder, start_new_session=True,
            )  # fmt: skip

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self.began

    @property
    def late(self) -> bool:
        """Whether its time is over."""
        return self.seconds > self.limit

    def ended(self) -> bool:
        """Whether the command has ended by itself; what it left running is ended then."""
        if self.code is None and (code := self._process.poll()) is not None:
            self.code = code
            self._sweep(0.0)
        return self.code is not None

    def end(self, grace: float = GRACE) -> None:
        """Ends it and all that it started; who does not end in time when asked is killed."""
        if self.code is None:
            self._sweep(grace)
            self.code = self._process.wait()

    def _sweep(self, grace: float) -> None:
        """Nothing of its group and of its mark runs after this."""
        last = time.monotonic() + grace
        self._tell(signal.SIGTERM if grace else signal.SIGKILL)
        while self._left() and time.monotonic() < last:
            time.sleep(0.05)
        self._tell(signal.SIGKILL)
        last = time.monotonic() + GRACE
        while self._left() and time.monotonic() < last:  # memory of a GPU is given back meanwhile
            self._tell(signal.SIGKILL)  # whom one of them has started since
            time.sleep(0.05)

    def _tell(self, what: signal.Signals) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, what)
        for pid in marked(self._mark):
            with suppress(ProcessLookupError):
                os.kill(pid, what)

    def _left(self) -> bool:
        return self._process.poll() is None or bool(marked(self._mark))


def marked(mark: str) -> list[int]:
    """The processes whose environment has this mark; zombies have none."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for entry in PROC.glob("[0-9]*"):
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # it has ended, or is somebody else's
            continue
    return found
