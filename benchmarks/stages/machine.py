"""What this machine has, and why a stage cannot run on it.

Knows nvidia-smi through `spark_engine.bench.machine`; the words of a command become those that are
run here.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from benchmarks.stages.table import Engine, Json, Stage
from spark_engine.bench import machine as card_of
from spark_engine.device.choice import VISIBLE, visible

ROOT = Path(__file__).parents[2]
LOOK = 1.0  # seconds for which clocks are watched


@dataclass(frozen=True)
class Machine:
    """`gpus`: how each is named in CUDA_VISIBLE_DEVICES."""

    gpus: tuple[str, ...]
    cores: int


def here() -> Machine:
    """This one."""
    count = 0
    while card_of.card(str(count)) is not None:
        count += 1
    listed = visible(os.environ)
    gpus = [str(i) for i in range(count)] if listed is None else listed[:count]
    return Machine(tuple(gpus), len(os.sched_getaffinity(0)))


def told(machine: Machine, commit: str) -> Json:
    """What may decide a figure, and is noted once: cards, clocks, who else is there, the tree."""
    cards = []
    for name in machine.gpus:
        with card_of.Watch(name) as watch:  # by number or by UUID: nvidia-smi takes both
            time.sleep(LOOK)
        idle = next(iter(watch.summary().values()), None)
        known = {"number": name, **(card_of.card(name) or {}), "idle": idle}
        cards.append(known | {"others": card_of.processes(name)})
    when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return {"at": when, "commit": commit, "cards": cards, "host": card_of.host()}


def commit_here() -> str:
    """Of the tree that is measured, with what was changed in it. A copy without git is told it
    (SPARK_COMMIT in the environment); else it is "unknown"."""
    if told_commit := os.environ.get("SPARK_COMMIT"):
        return told_commit
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def words_of(command: str) -> list[str]:
    """What is run for a command: this interpreter, and commands that are installed beside it."""
    words = [sys.executable if word == "python" else word for word in shlex.split(command)]
    beside = Path(sys.executable).parent / words[0]
    return [str(beside), *words[1:]] if beside.is_file() else words


def lacking(row: Stage | Engine, machine: Machine) -> str:
    """Why it cannot run here, with the remedy; empty where it can."""
    if row.gpus > len(machine.gpus):
        return f"needs {_some(row.gpus, 'GPU')}; nvidia-smi shows {len(machine.gpus) or 'none'}"
    if isinstance(row, Stage) and row.cores > machine.cores:
        return f"needs {row.cores} cores; there are {machine.cores}"
    program = words_of(row.command)[0]
    for name in (program, *row.needs.get("program", ())):
        if shutil.which(name) is None:
            remedy = "pip install -e ." if name.startswith("spark-") else "put it on PATH"
            return f"{name} is not installed here: {remedy}"
    for name in row.needs.get("package", ()):
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            return f"{name} has no installed metadata here: pip install -e ."
    for name in row.needs.get("module", ()):
        if not _importable(name):
            return f"Python has no module {name} here"
    for name in row.needs.get("file", ()):
        if not (ROOT / name).exists():
            return f"there is no {name}"
    return ""


def environment(row: Stage | Engine, gpus: tuple[str, ...]) -> dict[str, str]:
    """Of its process, which sees its GPUs alone."""
    found = {**os.environ, "PYTHONUNBUFFERED": "1", **row.env}
    return found | ({VISIBLE: ",".join(gpus)} if gpus else {})


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


def _some(count: int, thing: str) -> str:
    return f"{count} {thing}{'s' if count > 1 else ''}"
