"""What else may decide a figure: the card's clock and power, who else is on it, the host's load.

Knows nvidia-smi and what it prints; without one, or beside a server elsewhere, there is no card.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import threading
from types import TracebackType
from typing import IO

from spark_engine.bench.load import Json

SMI = "nvidia-smi"
EVERY_MS = 200
FIELDS = ("clocks.sm", "clocks.max.sm", "power.draw", "temperature.gpu", "utilization.gpu")
NAMES = ("sm_mhz", "sm_max_mhz", "watts", "celsius", "busy_percent")


def card(number: int = 0) -> Json | None:
    """A card as nvidia-smi numbers it: name, driver, power limit; None where there is none."""
    row = _ask("--query-gpu=name,driver_version,power.limit", "-i", str(number))
    if not row:
        return None
    name, driver, limit = (word.strip() for word in row[0].split(",")[:3])
    return {"name": name, "driver": driver, "power_limit_w": _number(limit)}


def processes(number: int = 0) -> list[str]:
    """Who computes on the card: process, name, MiB."""
    return _ask("--query-compute-apps=pid,process_name,used_gpu_memory", "-i", str(number))


def host() -> Json:
    """The machine that the clients run on."""
    load = os.getloadavg()[0]
    return {"name": platform.node(), "cores": os.cpu_count(), "load_before": round(load, 2)}


class Watch:
    """Samples the card of this number from `with` to its end."""

    def __init__(self, number: int = 0) -> None:
        self._number = str(number)
        self._rows: list[list[float | None]] = []
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watch:
        query = [f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
        command = [SMI, *query, "-i", self._number, "-lms", str(EVERY_MS)]
        try:
            pipe, none = subprocess.PIPE, subprocess.DEVNULL
            self._process = subprocess.Popen(command, stdout=pipe, stderr=none, text=True)
        except OSError:
            return self
        self._thread = threading.Thread(target=self._read, args=(self._process.stdout,))
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None and self._thread is not None:
            self._process.terminate()
            self._process.wait()
            self._thread.join()

    @property
    def samples(self) -> int:
        """How many there are."""
        return len(self._rows)

    def summary(self) -> Json | None:
        """Least, median and most of each; None where nothing was sampled."""
        columns = list(zip(*self._rows, strict=True))
        found = {}
        for name, column in zip(NAMES, columns, strict=False):
            if known := [value for value in column if value is not None]:
                found[name] = [min(known), statistics.median(known), max(known)]
        return found or None

    def _read(self, stream: IO[str] | None) -> None:
        for line in stream or ():
            words = line.split(",")
            if len(words) == len(FIELDS):
                self._rows.append([_number(word) for word in words])


def _ask(*query: str) -> list[str]:
    command = [SMI, *query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [] if done.returncode else [line for line in done.stdout.splitlines() if line.strip()]


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:  # "[N/A]"
        return None
