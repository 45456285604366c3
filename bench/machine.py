"""What else affects figures: the card's clock and power, other processes on it, the host's load.

Knows nvidia-smi and its output; without it, or for a server on another machine, there is no card.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import threading
from typing import IO

from spark_engine.bench.load import Json

SMI = "nvidia-smi"
EVERY_MS = 200
_SAMPLED = ("clocks.sm", "clocks.max.sm", "power.draw", "temperature.gpu", "utilization.gpu")
FIELDS = ("index", *_SAMPLED)
NAMES = ("sm_mhz", "sm_max_mhz", "watts", "celsius", "busy_percent")


def card(number: str = "0") -> Json | None:
    """A card by nvidia-smi's number: name, driver, power limit; None if there is none."""
    row = _ask("--query-gpu=name,driver_version,power.limit", "-i", number)
    if not row:
        return None
    name, driver, limit = (word.strip() for word in row[0].split(",")[:3])
    return {"name": name, "driver": driver, "power_limit_w": _number(limit)}


def processes(*numbers: str) -> list[str]:
    """The processes that compute on these cards: process, name, MiB."""
    return _ask("--query-compute-apps=pid,process_name,used_gpu_memory", "-i", ",".join(numbers))


def host() -> Json:
    """The machine that the clients run on."""
    load = os.getloadavg()[0]
    return {"name": platform.node(), "cores": os.cpu_count(), "load_before": round(load, 2)}


class Watch:
    """Samples these cards while the `with` block runs."""

    def __init__(self, *numbers: str) -> None:
        self._numbers = ",".join(numbers)
        self._rows: dict[str, list[list[float | None]]] = {}  # by card
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watch:
        query = [f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
        command = [SMI, *query, "-i", self._numbers, "-lms", str(EVERY_MS)]
        try:
            pipe, none = subprocess.PIPE, subprocess.DEVNULL
            self._process = subprocess.Popen(command, stdout=pipe, stderr=none, text=True)
        except OSError:
            return self
        self._thread = threading.Thread(target=self._read, args=(self._process.stdout,))
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._process is not None and self._thread is not None:
            self._process.terminate()
            self._process.wait()
            self._thread.join()

    @property
    def samples(self) -> int:
        return sum(map(len, self._rows.values()))

    def summary(self) -> dict[str, Json]:
        """By card, minimum, median and maximum of each quantity that was sampled."""
        found = {number: self._of(rows) for number, rows in self._rows.items()}
        return {number: row for number, row in found.items() if row}

    def _of(self, rows: list[list[float | None]]) -> Json:
        columns = list(zip(*rows, strict=True))
        found = {}
        for name, column in zip(NAMES, columns, strict=False):
            if known := [value for value in column if value is not None]:
                found[name] = [min(known), statistics.median(known), max(known)]
        return found

    def _read(self, stream: IO[str] | None) -> None:
        for line in stream or ():
            number, *words = line.split(",")
            if len(words) == len(NAMES):
                rows = self._rows.setdefault(number.strip(), [])
                rows.append([_number(word) for word in words])


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
