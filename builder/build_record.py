"""Runs a new engine once over fixed prompts, for the build record in its manifest.

The builder may not import the runtime, so it starts `runtime/engine/build_record.py` as a process.
That process has the GPU's memory to itself. Knows how to start it; knows no tokens.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from spark_engine.engine_file import MANIFEST
from spark_engine.manifest import Greedy, Manifest
from spark_engine.typed import typed

MODULE = "spark_engine.runtime.engine.build_record"
NOWHERE = "it was not run, since its target is not this machine's"
_CLASS = re.compile(r"^[\w.]+: ")


def recorded(
    folder: Path, manifest: Manifest, least: bool = False
) -> tuple[Manifest, tuple[str, ...]]:
    """Runs the complete engine in `folder` and rewrites its manifest with the record.

    With `least` only the smallest buckets of a CPU engine are run, which takes a few seconds.

    Returns the manifest and notes for the report. If the engine cannot run here, for instance for
    lack of memory, the record is empty and a note gives the reason; the build succeeds.
    """
    command = [sys.executable, "-P", "-m", MODULE, str(folder), *(["least"] if least else [])]
    code, out, words = _run(command)
    try:
        said = typed(Greedy, json.loads(out))
    except (ValueError, TypeError):
        last = (words.strip().splitlines() or [f"exit code {code}"])[-1]
        last = _CLASS.sub("", last)  # the type of an exception: dropped from the note
        return manifest, (f"no record of what its buckets say: running it failed ({last})",)
    if not said.md5:
        return manifest, (f"no record of what its buckets say: {NOWHERE}",)
    manifest = replace(manifest, greedy=said)
    (folder / MANIFEST).write_bytes(manifest.encode())
    return manifest, ()


def _run(command: list[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error. An exception here also ends the process."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            out, words = process.communicate()
        except BaseException:
            process.terminate()
            raise
    return process.returncode, out, words
