"""Files of measured rows, JSON, which is packed by xz where the name ends in `.xz`."""

import json
import lzma
import os
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CONFIGS, RESULTS = ROOT / "benchmarks" / "configs", ROOT / "benchmarks" / "results"
REHEARSED = RESULTS / "rehearsal"
MODELS = ("qwen36-27b", "qwen36-35b-a3b")  # folders of CONFIGS


def read(path: Path) -> Any:
    data = path.read_bytes()
    return json.loads(lzma.decompress(data) if path.suffix == ".xz" else data)


def write(path: Path, value: Any, text: str | None = None) -> None:
    """Writes the value, or its JSON `text`, through a temporary file: a reader never sees half."""
    text = text or json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    data = text.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.part")
    scratch.write_bytes(lzma.compress(data) if path.suffix == ".xz" else data)
    os.replace(scratch, path)


def commit_here() -> str:
    """The tree's commit, marked if files are changed; SPARK_COMMIT's in a copy without git, else
    "unknown"."""
    if known := os.environ.get("SPARK_COMMIT"):
        return known
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"
