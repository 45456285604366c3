"""What the host does for one decode step, without a device: the split by stage.

`python -m benchmarks.host_step [ROWS [K]]` runs ROWS (128) sequences that decode at depth 1 through
the real `Engine` over an executor that does what a native one does in Python (copies step inputs
into one block, copies narrow outputs out of another) and calls no driver. With K every round
verifies as many drafts, of which 0, 1, … K are kept in turn. Sequences come in over many steps, so
that their pages end in different steps, and end ids are looked for. Medians of one step in
microseconds; what the driver's calls take comes on top (`host_ms` of bench_decode has both).
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from spark_engine.interface import (
    PREFILL,
    Limits,
    common_states,
    drafts_of,
    families,
    outputs,
    steps,
    tables,
    tile_of,
)
from spark_engine.manifest import StateInfo
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.load import Loaded
from spark_engine.runtime.engine.request import Request, SamplingParams
from spark_engine.runtime.executors.executor import Specs, Wait
from spark_engine.tensors import Array

VOCAB, CONTEXT, PROMPT, EOS = 248_320, 1536, 1024, (5, 6)
WARM, STEPS, LOGPROBS = 20, 150, 4  # every LOGPROBS-th request asks for log-probabilities


class Blocks:
    """An executor that moves what a native one moves. It samples token 7 for every row."""

    def __init__(self, limits: Limits, family: str, rows: int) -> None:
        dims = {"rows": rows, "tokens": rows * tile_of(family)}
        inputs = tuple(s.bind(dims) for s in steps(family, limits.drafts))
        outs = tuple(s.bind(dims) for s in outputs(limits, family) if s.name != "logits")
        self.specs = Specs(inputs + tables(limits), (), outs)
        self._in = [(s.name, np.zeros(s.dims, s.dtype.numpy)) for s in inputs]
        self._out = [(s.name, np.zeros(s.dims, s.dtype.numpy)) for s in outs]
        for name, array in self._out:
            array.fill({"next_tokens": 7, "ok": 1}.get(name, 0))
        self._kept = np.arange(rows, dtype=np.int32) % (1 + drafts_of(family))

    def run(self, buffers: Mapping[str, Array]) -> None:
        """One step."""
        self.launch(buffers)()

    def launch(self, buffers: Mapping[str, Array]) -> Wait:
        """Copies in; the wait copies out."""
        for name, array in self._in:
            array[...] = buffers[name]

        def wait() -> None:
            for name, array in self._out:
                buffers[name][...] = array
            if "accepted" in buffers:
                np.minimum(self._kept + 1, buffers["counts"], out=buffers["accepted"])

        return wait

    def close(self) -> None:
        """Nothing to free."""


def make(rows: int, drafts: int) -> Engine:
    """An engine of `rows` slots whose pages are enough for all."""
    pages = rows * CONTEXT // 64
    limits = Limits(rows, CONTEXT, pages, VOCAB, drafts=drafts)
    wide = [n for n in (1, 8, 32, 64, 128) if n < rows] + [rows]
    keys = [(f, n) for f in families(drafts) if f != PREFILL for n in wide]
    executors = {k: Blocks(limits, *k) for k in (*keys, ("prefill", 32), ("prefill", 128))}
    states = tuple(StateInfo(s, "slot") for s in common_states(limits)[:1])
    costs = {key: 100.0 + drafts_of(key[0]) for key in keys}  # the longest round is the best
    loaded = Loaded(limits, EOS, states, tables(limits), executors, costs=costs)
    return Engine(loaded, EngineOptions(depth=1))


def clocked(spent: dict[str, float], name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    """`inner`, its seconds added to `spent[name]`."""

    def call(*args: Any) -> Any:
        start = time.perf_counter()
        result = inner(*args)
        spent[name] += time.perf_counter() - start
        return result

    return call


def split(engine: Engine, spent: dict[str, float]) -> None:
    """Puts a clock around each stage of the loop."""
    loop: Any = engine._loop  # the stages have no public names, and this is their clock
    scheduler: Any = engine.scheduler
    scheduler.schedule = clocked(spent, "schedule", scheduler.schedule)
    scheduler.depth.choose = clocked(spent, "choose k (part of schedule)", scheduler.depth.choose)
    for name, stage in (("_prepare", "tables"), ("_launch", "fill and launch"),
                        ("_collect", "read"), ("_postprocess", "postprocess")):  # fmt: skip
        setattr(loop, name, clocked(spent, stage, getattr(loop, name)))
    for executor in engine.loaded.executors.values():
        part: Any = executor
        part.launch = clocked(spent, "launch (part of fill and launch)", part.launch)


def measure(rows: int, drafts: int, staged: bool) -> list[dict[str, float]]:
    """Seconds by stage, one row a step; one stage alone, the whole, unless `staged`."""
    engine, spent = make(rows, drafts), defaultdict[str, float](float)
    if staged:
        split(engine, spent)
    rng = np.random.default_rng(0)
    for i in range(rows):
        params = SamplingParams(ignore_eos=i % 2 == 0, logprobs=5 if i % LOGPROBS == 0 else None)
        length = PROMPT - int(rng.integers(0, 64))
        engine.submit(Request(tuple(rng.integers(10, 1000, length).tolist()), params))
    while any(s.prefilling for s in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    found = []
    for turn in range(WARM + STEPS):
        spent.clear()
        start = time.perf_counter()
        events = engine.step()
        spent["whole step"] = time.perf_counter() - start
        assert len(events) >= rows
        if turn >= WARM:
            found.append(dict(spent))
    return found


def main() -> None:
    """Prints the table."""
    rows, drafts, *_ = [*map(int, sys.argv[1:]), *(128, 0)[len(sys.argv) - 1 :]]
    what = f"rows of {1 + drafts} tokens" if drafts else "decode rows"
    print(f"{rows} {what}, depth 1, microseconds a step over {STEPS} steps")
    for staged in (True, False):
        table = measure(rows, drafts, staged)
        for name in table[0] if staged else ("whole step",):
            if staged and name == "whole step":
                continue
            times = sorted(row.get(name, 0.0) * 1e6 for row in table)
            tail = times[len(times) * 99 // 100]
            print(f"  {name:34s} median {statistics.median(times):7.1f}  99 % {tail:7.1f}")


if __name__ == "__main__":
    main()
