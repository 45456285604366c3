"""From nothing to ready, and from a checkpoint to an engine: seconds of each stage.

`python -m benchmarks.time_start ENGINE` times `load` by its stages: imports, files (the manifest,
and every file but the weights verified), device (context), memory (states, tables, arena), buckets
by family (cubins, the capture), and the wait for the weights, which are read meanwhile; then the
command to `/ready`. With `--build CONFIG` it builds ENGINE first, and again unchanged, by the
stages of the build's report; a new parent folder of ENGINE has no kernels and no times.
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path


def stages(folder: Path) -> None:
    """Prints a line for each stage, buckets of a family together, and the seconds of all."""
    start = last = time.perf_counter()
    taken: dict[str, list[float]] = {}

    def mark(stage: str) -> None:
        nonlocal last
        now = time.perf_counter()
        taken.setdefault(stage.partition(" ")[0], []).append(now - last)
        last = now

    from spark_engine.runtime.engine.load import load

    mark("imports")
    loaded = load(folder, mark=mark, masks=True)
    for stage, seconds in taken.items():
        print(f"  {stage:14s} {sum(seconds):7.3f} s" + f" of {len(seconds)}" * (len(seconds) > 1))
    assert loaded.folder is not None
    weights = loaded.folder.weights_path.stat().st_size
    print(f"  loaded after {last - start:.3f} s; weights of {weights / 1e9:.2f} GB")
    loaded.close()


def served(folder: Path) -> None:
    """Prints the seconds from the command to `/ready`. Raises RuntimeError if the server ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    module = "spark_engine.runtime.cli.start"
    command = [sys.executable, "-P", "-m", module, str(folder), "--serve", "--port", str(port)]
    start = time.perf_counter()
    with tempfile.TemporaryFile() as said, subprocess.Popen(command, stderr=said) as server:
        try:
            while not _ready(port):
                if server.poll() is not None:
                    said.seek(0)
                    last = said.read().decode(errors="replace")[-2000:]
                    raise RuntimeError(
                        f"{' '.join(command)}: exit code {server.returncode}; {last}"
                    )
                time.sleep(0.01)
            print(f"  ready after {time.perf_counter() - start:.3f} s")
        finally:
            server.terminate()


def _ready(port: int) -> bool:
    with suppress(OSError):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=1) as answer:
            return bool(answer.status == 200)
    return False


def built(config: Path, folder: Path) -> None:
    """Builds the engine and prints the seconds of each stage. Raises CalledProcessError if the
    build fails."""
    module = "spark_engine.builder.cli"
    command = [sys.executable, "-P", "-m", module, str(config), "-o", str(folder), "--json"]
    start = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, stderr=subprocess.DEVNULL)
    report = json.loads(done.stdout)
    print("  " + ", ".join(f"{stage} {taken:.1f}" for stage, taken in report["seconds"].items()))
    print(*(f"  {note}" for note in report["notes"]), sep="\n")
    print(f"  built in {time.perf_counter() - start:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--build", type=Path, metavar="CONFIG", help="build the engine first")
    given = parser.parse_args()
    print(given.folder)
    for _ in range(2 if given.build else 0):
        built(given.build, given.folder)
    stages(given.folder)
    served(given.folder)


if __name__ == "__main__":
    sys.exit(main())
