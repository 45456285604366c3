"""From nothing to ready: the seconds of each stage of opening an engine, and the upload alone.

`python -m benchmarks.time_start ENGINE` times the imports, then `load` by its stages: files (the
manifest, and every file but the weights verified), device (context), weights (read, verified and
copied at once), memory (states, tables, arena), then each bucket (cubins, a first run, the
capture). `python -m benchmarks.time_start --file GIB [FOLDER]` writes a file of that size and
times `Upload` over numbers of threads and sizes of pieces: best and worst of three, GB/s.
The file is in the page cache in both cases if it was written or read shortly before.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np

CHUNK = 64 << 20
LANES, PIECES = (4, 8, 16), (1 << 20, 4 << 20, 16 << 20)


def stages(folder: Path) -> None:
    """Prints a line for each stage, and the seconds since `main` began."""
    start = last = time.perf_counter()

    def mark(stage: str) -> None:
        nonlocal last
        now = time.perf_counter()
        print(f"  {stage:14s} {now - last:7.3f} s")
        last = now

    from spark_engine.runtime.engine.load import load

    mark("imports")
    loaded = load(folder, mark=mark)
    assert loaded.folder is not None
    weights = loaded.folder.weights_path.stat().st_size
    print(f"  ready after {last - start:.3f} s; weights of {weights / 1e9:.2f} GB")
    for executor in loaded.executors.values():
        executor.close()


def upload(size: int, folder: Path) -> None:
    """Prints GB/s by threads and pieces."""
    from spark_engine.device.gpu import Gpu
    from spark_engine.device.resources import DeviceResources
    from spark_engine.runtime.executors import upload as module

    path = folder / "upload_trial"
    block = np.random.default_rng(0).bytes(CHUNK)
    with path.open("wb") as file:
        for _ in range(size // CHUNK):
            file.write(block)
    gpu = Gpu()
    try:
        for piece in PIECES:
            module.PIECE = piece
            for lanes in LANES:
                rates = []
                for _ in range(3):
                    digests: dict[int, str] = {}
                    start = time.perf_counter()
                    resources = DeviceResources(gpu)
                    module.Upload(resources, path, CHUNK, digests.__setitem__, lanes).wait()
                    rates.append(size / (time.perf_counter() - start) / 1e9)
                    resources.close()
                    assert len(set(digests.values())) == 1, "equal chunks have equal digests"
                print(f"  pieces of {piece >> 20:2d} MiB, {lanes:2d} threads: "
                      f"{max(rates):6.2f} GB/s, worst {min(rates):6.2f}")  # fmt: skip
    finally:
        path.unlink()
        gpu.close()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("/tmp"))
    parser.add_argument("--file", type=float, help="GiB of a file to upload")
    given = parser.parse_args()
    if given.file:
        print(f"upload of {given.file:g} GiB")
        upload(int(given.file * (1 << 30)) // CHUNK * CHUNK, given.folder)
    else:
        print(given.folder)
        stages(given.folder)


if __name__ == "__main__":
    sys.exit(main())
