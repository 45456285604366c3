"""Runs a new engine once over fixed prompts, for the build record in its manifest.

Starts check/build_record.py as a process: the builder may not import the runtime, and the process
has the GPU's memory to itself. Knows how to start it; knows nothing of the tokens.
"""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from spark_engine.engine_file import MANIFEST
from spark_engine.manifest import Greedy, Manifest
from spark_engine.typed import typed

MODULE = "spark_engine.check.build_record"
NOWHERE = "it was not run, since its target is not this machine's"
_CLASS = re.compile(r"^[\w.]+: ")  # of an exception


def recorded(
    folder: Path, manifest: Manifest, least: bool = False
) -> tuple[Manifest, tuple[str, ...]]:
    """Runs the sealed engine in `folder` and writes its manifest again, with the record.

    With `least` only the smallest buckets of a CPU engine are run, which takes a few seconds.

    Returns the manifest and sentences for the report. If the engine cannot run here, for instance
    because the memory is in use, its record stays empty and a sentence says why.
    """
    command = [sys.executable, "-P", "-m", MODULE, str(folder), *(["least"] if least else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        record = typed(Greedy, json.loads(done.stdout))
    except (ValueError, TypeError):
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        last = _CLASS.sub("", last)
        return manifest, (f"no record of what its buckets say: running it failed ({last})",)
    if not record.md5:
        return manifest, (f"no record of what its buckets say: {NOWHERE}",)
    manifest = replace(manifest, greedy=record)
    (folder / MANIFEST).write_bytes(manifest.encode())
    return manifest, ()
