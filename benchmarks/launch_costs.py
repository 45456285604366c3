"""What one launch of every bucket takes: full, half full, and far into a context.

`python -m benchmarks.launch_costs ENGINE [--out FILE]` prints a line for each bucket: milliseconds
by the build's table, of a full launch, of one whose rows are live by half, and of a full one after
CONTEXTS positions where the engine's context holds them. Prefill is of one sequence, decode of rows
at position DEPTH each. Every time is that of REPEATS launches queued one after the other, divided.
With --out the rows are kept as JSON, from which `benchmarks.pacing` reckons whole loads.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence as Several
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from spark_engine.interface import DECODE, PREFILL, PREFILL_TILE
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.plan import Batch
from spark_engine.runtime.engine.prepare_inputs import write_row, write_step_inputs
from spark_engine.runtime.engine.request import Request, SamplingParams, capacity
from spark_engine.runtime.engine.sequence import Sequence

CONTEXTS = (16_384, 65_536)
DEPTH, REPEATS, IDS = 1024, 2, 200_000
Row = dict[str, Any]


class Launches:
    """Launches of one engine that are no step of its loop."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self._rng = engine, np.random.default_rng(0)
        self.limits = engine.loaded.limits

    def sequences(self, count: int, tokens: int) -> list[Sequence]:
        """So many of random tokens, in slots and pages of their own."""
        pages, found = -(-(tokens + 1) // self.limits.page_size), []
        for slot in range(count):
            prompt = self._rng.integers(0, min(IDS, self.limits.vocab), tokens).tolist()
            seq = Sequence(
                slot, Request(tuple(prompt), SamplingParams(0.0)), tokens, frozenset(), 0
            )
            seq.slot, seq.pages = slot, list(range(slot * pages, (slot + 1) * pages))
            write_row(self.engine.memory.tables, seq)
            self.engine.memory.mark(slot)
            found.append(seq)
        self.engine.memory.flush()
        return found

    def microseconds(self, batch: Batch, repeats: int = REPEATS) -> float:
        """Of one launch of the batch."""
        key = batch.family, batch.bucket
        buffers, executor = self.engine.memory.buffers(*key, 0), self.engine.loaded.executors[key]
        write_step_inputs(buffers, batch)
        executor.launch(buffers)()
        start = time.perf_counter()
        waits = [executor.launch(buffers) for _ in range(repeats)]
        for wait in waits:
            wait()
        return round((time.perf_counter() - start) / repeats * 1e6, 1)

    def prefill(self, bucket: int, live: int, context: int = 0) -> Batch:
        """`live` tiles of one sequence from this position on."""
        [seq] = self.sequences(1, context + live * PREFILL_TILE)
        starts = [context + i * PREFILL_TILE for i in range(live)]
        emits = [i == live - 1 for i in range(live)]
        counts, own, none = [PREFILL_TILE] * live, [seq.slot] * live, [-1] * live
        return Batch(PREFILL, bucket, [seq] * live, starts, counts, emits, own, none)

    def decode(self, bucket: int, live: int) -> Batch:
        """A token of each of `live` sequences."""
        seqs = self.sequences(live, DEPTH + 8)
        return Batch(DECODE, bucket, seqs, [DEPTH] * live, [1] * live, [True] * live)

    def rows(self) -> list[Row]:
        """What every bucket takes, in microseconds."""
        built, found = self.engine.loaded.costs, []
        for family, make in ((DECODE, self.decode), (PREFILL, self.prefill)):
            for bucket in self.engine.loaded.rows(family):
                row = {"family": family, "rows": bucket, "built_us": built[family, bucket]}
                row["us"] = self.microseconds(make(bucket, bucket))
                if bucket > 1:
                    row["half_us"] = self.microseconds(make(bucket, bucket // 2))
                for context in CONTEXTS if family == PREFILL else ():
                    if context + bucket * PREFILL_TILE < capacity(self.limits):
                        batch = self.prefill(bucket, bucket, context)
                        row[f"us_at_{context}"] = self.microseconds(batch, 2)
                found.append(row)
        return found


def line(row: Row) -> str:
    """One printed line."""
    tokens = row["rows"] * (PREFILL_TILE if row["family"] == PREFILL else 1)
    far = "".join(
        f"  at {c:,} {row[name] / 1e3:8.2f}" for c in CONTEXTS if (name := f"us_at_{c}") in row
    )
    return (
        f"{row['family']:8}{tokens:6} tokens: built {row['built_us'] / 1e3:8.2f} ms, full "
        f"{row['us'] / 1e3:8.2f} ({tokens / row['us'] * 1e6:9,.0f} tok/s), half full "
        f"{row.get('half_us', 0) / 1e3:8.2f}{far}"
    )


def main(words: Several[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path, help="engine folder")
    parser.add_argument("--model", help="its name in the rows; default the engine's")
    parser.add_argument("--out", type=Path, help="JSON file of rows to add to")
    args = parser.parse_args(words)
    engine = Engine.open(args.engine, EngineOptions(swap_bytes=0))
    rows = Launches(engine).rows()
    engine.close()
    for row in rows:
        print(line(row), flush=True)
    if args.out:
        known = {"model": args.model or args.engine.name, "date": str(date.today())}
        held = json.loads(args.out.read_text())["rows"] if args.out.is_file() else []
        kept = [r for r in held if r["model"] != known["model"]]
        args.out.write_text(json.dumps({"rows": kept + [known | r for r in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
