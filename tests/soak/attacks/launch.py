"""Runs a module of the product as a program, and writes how long callbacks of its event loops take.

    python -P launch.py FILE MODULE ARGUMENTS…

Each line of FILE is JSON: `at` (time.time()), `seconds` (CPU time of the loop's thread) and `what`,
for each callback of NOTED_S or more. The product needs no option for it. It is started by its path,
since a clone's root has a `spark_engine` without the other packages.
"""

import asyncio
import gc
import importlib
import json
import os
import runpy
import sys
import time
from pathlib import Path

NOTED_S = 0.01
PAUSE = "ABUSE_LONGEST_PAUSE_S"  # environment: between a death of the engine and its next start


def watch(file: Path) -> None:
    """Measures all callbacks of this process from now on."""
    run = asyncio.events.Handle._run  # type: ignore[attr-defined]

    collected, started = [0.0], [0.0]

    def note_collection(phase: str, _: object) -> None:
        started[0] = time.thread_time() if phase == "start" else started[0]
        collected[0] += time.thread_time() - started[0] if phase == "stop" else 0.0

    def timed(handle: asyncio.Handle) -> None:
        begin, collected[0] = time.thread_time(), 0.0
        try:
            run(handle)
        finally:
            took = time.thread_time() - begin
            if took >= NOTED_S:
                task = getattr(handle._callback, "__self__", None)  # type: ignore[attr-defined]
                what = repr(task if isinstance(task, asyncio.Task) else handle)[:300]
                what = f"{collected[0] * 1e3:.0f} ms of it collecting garbage; {what}"
                row = {"at": time.time(), "seconds": took, "what": what}
                with file.open("a") as log:
                    log.write(json.dumps(row) + "\n")

    gc.callbacks.append(note_collection)
    asyncio.events.Handle._run = timed  # type: ignore[attr-defined]


def main() -> None:
    file, module, *arguments = sys.argv[1:]
    watch(Path(file))
    if PAUSE in os.environ:
        supervisor = importlib.import_module("spark_engine.runtime.server.engine_client.supervisor")
        supervisor.LONGEST_PAUSE_S = float(os.environ[PAUSE])  # type: ignore[attr-defined]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
