"""The embedded model: the paths of its checkpoint and its engine, and building it.

Knows folders and the builder's command line. The runtime may not import the builder or the models,
so the builder is started as a process and the checkpoint found by its path.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

from spark_engine.engine_file import MANIFEST, read_manifest
from spark_engine.errors import EngineError

NAME = "tiny"
# For a few users; the defaults plan more.
SIZES = ("--max-seqs", "16", "--prefill", "64,256", "--kv-tokens", "32768", "--cache-gib", "0.05")
Say = Callable[[str], None]


def cache_folder(environ: Mapping[str, str]) -> Path:
    """The user's folder of caches."""
    given = environ.get("XDG_CACHE_HOME")
    return Path(given) if given else Path.home() / ".cache"


def embedded_engine(cache: Path, say: Say) -> Path:
    """The engine folder of the embedded model, built now if it is missing or out of date.

    In a source checkout it is `engines/tiny`, else `cache/spark/engines/VERSION/tiny`. Raises
    EngineError when the checkpoint is missing or cannot be built.
    """
    checkpoint = find_checkpoint()
    folder = engine_folder(checkpoint, cache)
    if is_stale(folder, checkpoint):
        say(f"building the embedded model into {folder} (once)")
        build(checkpoint, folder)
    return folder


def find_checkpoint() -> Path:
    """The folder of the embedded checkpoint. Raises EngineError when it was not installed."""
    spec = importlib.util.find_spec("spark_engine.models")
    places = list(spec.submodule_search_locations or ()) if spec else []
    for place in places:
        folder = Path(place) / NAME / "checkpoint"
        if (folder / "config.json").exists():
            return folder
    raise EngineError(
        f"the embedded model is missing (looked for {NAME}/checkpoint/config.json in "
        f"{', '.join(places) or 'no place'}); name an engine folder, or install the package again"
    )


def engine_folder(checkpoint: Path, cache: Path) -> Path:
    root = checkpoint.parents[2]
    ours = root / "engines"
    if (root / "pyproject.toml").exists() and ours.is_dir():
        if os.access(ours, os.W_OK) or not is_stale(ours / NAME, checkpoint):
            return ours / NAME
    return cache / "spark" / "engines" / version("spark-engine") / NAME


def is_stale(folder: Path, checkpoint: Path) -> bool:
    """True if there is no engine, one of another format, or a newer checkpoint file."""
    manifest = folder / MANIFEST
    try:
        read_manifest(folder)
    except EngineError:
        return True
    built = manifest.stat().st_mtime
    return any(file.stat().st_mtime > built for file in checkpoint.iterdir())


def build(checkpoint: Path, folder: Path) -> None:
    """Runs `spark-build` and shows its stages, but not its report. Raises EngineError if it
    fails."""
    parent = folder.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        writable = os.access(parent, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise EngineError(
            f"the embedded model must be built once, and {parent} cannot be written: set "
            "XDG_CACHE_HOME to a folder that can, or name an engine"
        )
    module = "spark_engine.builder.cli"
    command = [sys.executable, "-P", "-m", module, str(checkpoint), "-o", str(folder)]
    command += ["--no-record", *SIZES]  # recording takes longer than the build: the user waits
    code = _run(command)
    if code or not (folder / MANIFEST).exists():
        raise EngineError(
            f"building the embedded model failed with code {code}; see its output above"
        )
    os.utime(folder / MANIFEST)  # an unchanged engine is not rewritten, and would stay out of date


def _run(command: list[str]) -> int:
    """Runs a command; returns its exit code. If this process is ended, the command is too."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            raise
