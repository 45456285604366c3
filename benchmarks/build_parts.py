"""A build and what its choice of tactics consists of: calls and seconds of each part.

`python -m benchmarks.build_parts CHECKPOINT -o ENGINE ...` takes the options of `spark-build`, and
prints the parts behind its report. A part includes those that it calls.
"""

import sys
import time
from typing import Any

from spark_engine.builder import background
from spark_engine.builder.cli import main as build
from spark_engine.builder.native import backend, gpu_timer, nvrtc, replays
from spark_engine.device.gpu import Gpu
from spark_engine.device.resources import DeviceResources

OF_BUCKETS = ("choose", "_decide", "_forms", "_add_finer", "_begin_early", "compile", "emit")
PARTS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (backend.NativeBackend, OF_BUCKETS),
    (backend.Chooser, ("candidates", "_able")),
    (nvrtc.Compiler, ("start", "__call__")),
    (gpu_timer.GpuTimer, ("__call__", "_measure", "_measure_all", "_functions")),
    (gpu_timer._Bench, ("__init__", "fill", "seconds", "free")),
    (replays.Timed, ("__init__", "seconds")),
    (Gpu, ("allocate", "free", "wait", "upload", "copy", "load")),
    (DeviceResources, ("close",)),
    (background, ("_result",)),
)


def main() -> None:
    taken: dict[str, list[float]] = {}

    def timed(owner: Any, name: str) -> None:
        inner, seconds = getattr(owner, name), taken.setdefault(f"{owner.__name__}.{name}", [])

        def outer(*args: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args, **named)
            finally:
                seconds.append(time.perf_counter() - start)

        setattr(owner, name, outer)

    for owner, names in PARTS:
        for name in names:
            timed(owner, name)
    try:
        build(sys.argv[1:], standalone_mode=False)
    finally:
        for part, seconds in sorted(taken.items(), key=lambda row: -sum(row[1])):
            print(f"{sum(seconds):8.2f} s {len(seconds):7d} {part}")


if __name__ == "__main__":
    main()
