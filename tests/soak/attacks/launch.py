"""Runs a module of the product as a program, and writes how long callbacks of its event loops take.

    python -P launch.py FILE MODULE ARGUMENTS…

Each line of FILE is JSON: `at` (time.time()), `seconds` (CPU time of the loop's thread) and `what`,
for each callback of NOTED_S or more. The product needs no option for it. It is started by its path,
since a clone's root has a `spark_engine` without the other packages.
"""

from __future__ import annotations

import asyncio
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

    def timed(handle: asyncio.Handle) -> None:
        begin = time.thread_time()
        try:
            run(handle)
        finally:
            took = time.thread_time() - begin
            if took >= NOTED_S:
                row = {"at": time.time(), "seconds": took, "what": repr(handle)[:300]}
                with file.open("a") as log:
                    log.write(json.dumps(row) + "\n")

    asyncio.events.Handle._run = timed  # type: ignore[attr-defined]


def main() -> None:
    """Watches, then runs the module."""
    file, module, *arguments = sys.argv[1:]
    watch(Path(file))
    if PAUSE in os.environ:
        supervisor = importlib.import_module("spark_engine.runtime.server.supervisor")
        supervisor.LONGEST_PAUSE_S = float(os.environ[PAUSE])  # type: ignore[attr-defined]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
