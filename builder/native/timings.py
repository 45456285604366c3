"""The file of earlier measurements: a tactic is timed once per machine.

Knows JSON and what a measurement depends on; knows no CUDA. The file cannot fail a build: a note
reports entries that are unreadable or of another GPU, driver or compiler, which are not used.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from spark_engine.builder.native.tactics import Work
from spark_engine.kernel import Plan, Tactic
from spark_engine.manifest import Json

FORMAT = 2  # of 1 are times with delays of the host in them
# "... x86_64 Kernel Module  535.104.05 ...", "... Open Kernel Module for x86_64  570.86.15 ..."
_DRIVER = re.compile(r"Kernel Module(?: for \S+)?\s+(\d[\d.]*)")


@dataclass(frozen=True)
class Machine:
    """The machine and versions on which all times of a file depend."""

    gpu: str
    driver: str
    compiler: str

    @property
    def label(self) -> str:
        return f"{self.gpu}, driver {self.driver}, NVRTC {self.compiler}"


def driver_version(text: str) -> str | None:
    """The driver's version in /proc/driver/nvidia/version, of the proprietary or the open
    driver."""
    found = _DRIVER.search(text)
    return found[1] if found else None


def digest_of(texts: Mapping[str, str]) -> str:
    """sha256 of sources by name."""
    return hashlib.sha256(json.dumps(sorted(texts.items())).encode()).hexdigest()


def key_of(work: Work, tactic: Tactic, plan: Plan, sources: str) -> str:
    """sha256 of what a time depends on in addition to the machine; `sources`: of `digest_of`."""
    attrs = dict(sorted(work.attrs.items()))
    specs = [[s.dtype.value, list(s.dims)] for s in (*work.ins, *work.outs)]
    conditions = [sorted(work.cold), work.context]
    parts: Json = [work.name, tactic.name, attrs, specs, *conditions, repr(plan)]
    return hashlib.sha256(json.dumps([parts, sources], sort_keys=True).encode()).hexdigest()


class Timings:
    """Seconds by key of one machine; those of other machines stay in the file and are not used."""

    def __init__(self, path: Path, machine: Machine) -> None:
        self.notes: list[str] = []
        self._path, self._label = path, machine.label
        self._all = self._read()
        others = sorted(name for name in self._all if name != self._label)
        if others:
            self.notes.append(
                f"{path} also holds times of {'; '.join(others)}: not used for {self._label}"
            )
        self._mine = self._all.setdefault(self._label, {})

    def get(self, key: str) -> float | None:
        return self._mine.get(key)

    def put(self, key: str, seconds: float) -> None:
        self._mine[key] = seconds

    def save(self) -> None:
        """Writes the file atomically. Adds a note if the folder cannot be written."""
        text = json.dumps({"format": FORMAT, "machines": self._all}, indent=1, sort_keys=True)
        part = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(text + "\n")
            os.replace(part, self._path)
        except OSError as error:
            part.unlink(missing_ok=True)
            self.notes.append(f"times were not kept in {self._path}: {error}")

    def _read(self) -> dict[str, dict[str, float]]:
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return {}
        except (OSError, UnicodeDecodeError) as error:
            self.notes.append(f"{self._path} is not readable ({error}): tactics are timed again")
            return {}
        try:
            return _parse(json.loads(text))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            self.notes.append(f"{self._path} is not usable ({error!r}): tactics are timed again")
            return {}


def _parse(body: Json) -> dict[str, dict[str, float]]:
    if body["format"] != FORMAT:
        raise ValueError(f"format {body['format']}, not {FORMAT}")
    found: dict[str, dict[str, float]] = {}
    for label, times in body["machines"].items():
        found[label] = {str(key): float(seconds) for key, seconds in times.items()}
        if not all(math.isfinite(s) and s > 0 for s in found[label].values()):
            raise ValueError(f"a time of {label} is no positive number")
    return found
