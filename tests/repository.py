"""The repository as tests see it: its packages, and the files that git tracks or would track."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Of a process that imports `tests`: behind what this one was given.
PATH = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
PACKAGES = ("spark_engine", "device", "plugins", "models", "builder", "runtime", "check", "bench")


def files(*patterns: str, tracked_only: bool = False) -> list[Path]:
    """Files of the working tree that git does not ignore, relative to the root, sorted."""
    others = [] if tracked_only else ["--others", "--exclude-standard"]
    command = ["git", "ls-files", "--cached", *others, "--", *patterns]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return sorted({Path(line) for line in done.stdout.splitlines() if (ROOT / line).is_file()})
