"""Decode steps as they are served: with and without CUDA graphs, and where their time goes.

`python -m benchmarks.served_steps ENGINE [--repeat N] [--out FILE]` runs, in process and without
HTTP, requests of 64 random ids that decode greedily: milliseconds of a step (the median of 32) at
WIDTHS, once with graphs and once launch by launch; at the largest width what `spark-run --profile`
tells of a step, part by part; and `spark-check --repeat N`: how many of 16 texts part. On a CPU
nothing is captured, so there is one column.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from spark_engine.check.repeat import repeat
from spark_engine.manifest import NATIVE
from spark_engine.progress import Progress
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.load import Loaded, load
from spark_engine.runtime.engine.request import Request, SamplingParams
from spark_engine.runtime.engine.trace import ENGINE, Trace

WIDTHS = (1, 4, 8, 32, 64, 128)
PROMPT, WARM, STEPS = 64, 8, 32  # tokens of a prompt; steps
IDS = 200_000  # prompts are drawn from the ids below
PARTS = ("schedule", "prepare", "fill", "launch", "wait", "finish", "between steps")
Row = dict[str, Any]


class Lockstep:
    """`width` requests that decode together in an engine of their own, until `close`."""

    def __init__(self, loaded: Loaded, width: int, trace: Trace | None = None) -> None:
        self.engine = Engine(loaded, EngineOptions(cache_bytes=0, drafts=0), trace)
        rng, vocab = np.random.default_rng(0), min(IDS, loaded.limits.vocab)
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=4 * (WARM + STEPS))
        waiting = {
            self.engine.submit(Request(tuple(rng.integers(0, vocab, PROMPT).tolist()), params))
            for _ in range(width)
        }
        self._ids = list(waiting)
        while waiting:
            waiting -= {event.request_id for event in self.engine.step()}
        for _ in range(WARM):
            self.engine.step()

    def steps(self) -> list[float]:
        """Seconds of each of STEPS steps."""
        found = []
        for _ in range(STEPS):
            start = time.perf_counter()
            self.engine.step()
            found.append(time.perf_counter() - start)
        return found

    def close(self) -> None:
        """Ends the requests."""
        for number in self._ids:
            self.engine.cancel(number)
        while not self.engine.idle:
            self.engine.step()


def step_ms(loaded: Loaded, widths: Sequence[int]) -> dict[str, float]:
    """Median milliseconds of a step by width."""
    found = {}
    for width in widths:
        run = Lockstep(loaded, width)
        found[str(width)] = round(statistics.median(run.steps()) * 1e3, 4)
        run.close()
    return found


def parts_ms(loaded: Loaded, width: int) -> Row:
    """Milliseconds of a step by part, and the shares of the time that launches ran in."""
    trace = Trace(ENGINE, Path("never written"))
    run = Lockstep(loaded, width, trace)
    before = _seconds(trace)
    run.steps()
    spent = {name: seconds - before.get(name, 0.0) for name, seconds in _seconds(trace).items()}
    run.close()
    whole = spent["busy"] + spent["host"] + spent["idle"]
    parts = {name: round(spent.get(name, 0.0) * 1e3 / STEPS, 4) for name in PARTS}
    shares = {name: round(spent[name] / whole, 4) for name in ("busy", "host", "idle")}
    return {"width": width, "parts_ms": parts, "shares": shares}


def _seconds(trace: Trace) -> dict[str, float]:
    found = trace.shares()
    idle = found["parts_s"].get("idle", 0.0)
    whole = max(found["wall_s"], idle + found["shares"]["busy"] * found["wall_s"])
    return {**found["parts_s"], **{k: share * whole for k, share in found["shares"].items()}}


def measure(folder: Path, count: int) -> Row:
    """All of it, printed as it comes."""
    loaded = load(folder)
    widths = [n for n in WIDTHS if n <= loaded.limits.max_seqs]
    native = loaded.folder is not None and loaded.folder.manifest.executor == NATIVE
    found: Row = {"engine": folder.name, "graphs_ms": step_ms(loaded, widths)}
    print("ms a step", found["graphs_ms"], flush=True)
    found |= parts_ms(loaded, widths[-1])
    print(f"at {widths[-1]}", found["parts_ms"], found["shares"], flush=True)
    if count:
        found["repeat"] = asdict(repeat(loaded, folder.name, count, [], Progress(None)))
        same = [run["same"] for run in found["repeat"]["runs"]]
        print(f"texts of {found['repeat']['texts']} that are the same: {same}", flush=True)
    loaded.close()
    if native:
        apart = load(folder, cache_bytes=0, graphs=False)
        found["launches_ms"] = step_ms(apart, widths)
        apart.close()
        print("launch by launch", found["launches_ms"], flush=True)
    return found


def main(words: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("engine", type=Path, help="engine folder")
    parser.add_argument("--repeat", type=int, default=4, help="runs beside the first; 0: none")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(words)
    found = measure(args.engine, args.repeat)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
