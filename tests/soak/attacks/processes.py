"""Servers as processes: their memory, descriptors, children, log, and their loop's callbacks.

Knows command lines and /proc; knows no API.
"""

import contextlib
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ports import free_port

START_S = 300.0  # the first start builds the embedded engine
END_S = 60.0
PAUSE = "ABUSE_LONGEST_PAUSE_S"  # as launch.py reads it
HERE = Path(__file__).parent
_CACHED = re.compile(r"^spark:prefix_cache_bytes(?:\{[^}]*\})? ([\d.e+]+)$", re.M)
SERVER = "spark_engine.runtime.cli.spark_run"
FRONT = "spark_engine.runtime.cli.spark_replicas"
ENGINE, TEXT = (
    "spark_engine.runtime.server.engine_client.worker",
    "spark_engine.runtime.server.prompts.worker",
)


def children(pid: int) -> list[int]:
    """Those that a process started and that still run."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(word) for word in path.read_text().split()]
    return found


def family(pid: int) -> list[int]:
    """A process, its children, their children, …"""
    found = [pid]
    for one in found:
        found += children(one)
    return found


def rss_mb(pid: int) -> float:
    """Resident memory in MiB; 0 for a process that is gone."""
    with contextlib.suppress(OSError, StopIteration):
        rows = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(row.split()[1]) for row in rows if row.startswith("VmRSS")) / 1024
    return 0.0


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def runs(pid: int, module: str) -> bool:
    """Whether a process is Python with this module as its program."""
    with contextlib.suppress(OSError):
        return module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return False


@dataclass(frozen=True)
class How:
    """How a server is started."""

    options: tuple[str, ...] = ()  # of its command line, beyond port and address
    shell: str = ""  # what a shell does before
    key: str = ""  # what an honest client sends
    module: str = SERVER  # the program
    # At most, between a death of the engine and its next start; None: as always.
    pause_s: float | None = None
    tls: bool = False  # it speaks HTTPS
    port: int = 0  # where it listens; 0: at a free one


class Server:
    """A server process and what is known of it."""

    def __init__(self, folder: Path, how: How) -> None:
        self.folder, self.how = folder, how
        self.address = ("127.0.0.1", how.port or free_port())
        self.url = "{}://{}:{}".format("https" if how.tls else "http", *self.address)
        self.log, self._callbacks = folder / "log", folder / "callbacks"
        command = [sys.executable, "-P", str(HERE / "launch.py"), str(self._callbacks), how.module]
        command += ["--serve"] if how.module == SERVER else ["front"]
        command += ["--port", str(self.address[1])]
        pause = {} if how.pause_s is None else {PAUSE: str(how.pause_s)}
        with self.log.open("ab") as target:
            self.process = subprocess.Popen(
                ["sh", "-c", f'{how.shell}\nexec "$@"', "sh", *command, *how.options],
                cwd=folder,
                env={**os.environ, **pause},
                stdout=target,
                stderr=target,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def engine(self) -> int | None:
        return next((p for p in children(self.pid) if runs(p, ENGINE)), None)

    @property
    def forker(self) -> int | None:
        """The process that forks those that read prompts."""
        return next((p for p in children(self.pid) if runs(p, TEXT)), None)

    @property
    def text_workers(self) -> list[int]:
        forker = self.forker
        return [] if forker is None else children(forker)

    def memory_mb(self) -> float:
        """Of all of its processes, in MiB."""
        return sum(map(rss_mb, family(self.pid)))

    def held_mb(self) -> float:
        """The same, without what the engine's prefix cache holds within its budget."""
        return self.memory_mb() - (0.0 if self.how.module == FRONT else self.cached_mb())

    def cached_mb(self) -> float:
        """Of the prefix cache, in MiB; 0 while the server does not answer."""
        headers = {"Authorization": f"Bearer {self.how.key}"} if self.how.key else {}
        with contextlib.suppress(OSError, ValueError):
            with self._open("/metrics", headers) as answer:
                found = _CACHED.search(answer.read().decode())
                return float(found[1]) / (1 << 20) if found else 0.0
        return 0.0

    def memory_by_role(self) -> dict[str, int]:
        """The same of the HTTP process, the engine process, and those that read prompts."""
        engine, text = self.engine or 0, [self.forker or 0, *self.text_workers]
        found = {"HTTP": rss_mb(self.pid), "engine": rss_mb(engine)}
        return {k: round(v) for k, v in (found | {"text": sum(map(rss_mb, text))}).items()}

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def worst_callback(self, since: float) -> tuple[float, str]:
        """CPU seconds of the longest callback since then, and what it was."""
        rows = [json.loads(line) for line in self._lines()]
        rows = [row for row in rows if row["at"] >= since]
        worst = max(rows, key=lambda row: float(row["seconds"]), default=None)
        return (0.0, "") if worst is None else (worst["seconds"], worst["what"])

    def _lines(self) -> list[str]:
        with contextlib.suppress(OSError):
            return self._callbacks.read_text().splitlines()
        return []

    def is_healthy(self) -> bool:
        """Whether GET /health gives 200."""
        with contextlib.suppress(OSError, ValueError):
            with self._open("/health", {}) as found:
                return bool(found.status == 200)
        return False

    def _open(self, path: str, headers: dict[str, str]) -> Any:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        asked = urllib.request.Request(self.url + path, headers=headers)
        return urllib.request.urlopen(asked, timeout=5, context=context)

    def wait(self, seconds: float = START_S) -> None:
        """Until it is healthy."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            if self.is_healthy():
                return
            time.sleep(0.2)
        raise SystemExit(f"the server did not start:\n{self.log.read_text()[-3000:]}")

    def stop(self) -> int:
        """SIGTERM; the exit code, -9 where it had to be killed."""
        descendants = family(self.pid)
        self.process.terminate()
        try:
            return self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return -9
        finally:
            for pid in descendants[1:]:
                if is_running(pid) and (runs(pid, ENGINE) or runs(pid, TEXT)):
                    os.kill(pid, signal.SIGKILL)


@contextmanager
def server(folder: Path, how: How) -> Iterator[Server]:
    """One that is healthy; it is stopped at the end."""
    folder.mkdir(exist_ok=True)
    found = Server(folder, how)
    try:
        found.wait()
        yield found
    finally:
        if found.process.poll() is None:
            found.stop()


def left_over(pids: Sequence[int], seconds: float = 5.0) -> list[int]:
    """Those that still run after so long."""
    end = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < end:
        time.sleep(0.1)
    return left
