"""Who a decode step waits for: the GPU's share of it, the host's, and a step without CUDA graphs.

`python -m benchmarks.step_shares ENGINE [--rows 1,4,8,32,64,128] [--out FILE]` runs sequences of
1,024 random tokens in lockstep through the real `Engine`, one step ahead, told to a trace
(`spark-run --profile`), and then once more with every launch queued by itself (`--no-graphs`).
`busy` is the share of the time in which launches ran, from the first copy up to the last copy down,
and `host` the rest; without graphs the gaps between kernels count as busy. `parts` are a step's
microseconds on the host: `wait` is what it had left over, so the others are what the host takes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.request import Request, SamplingParams
from spark_engine.runtime.engine.trace import Trace

CONTEXT, WARM, STEPS, IDS = 1024, 8, 64, 200_000
Row = dict[str, Any]


class Shares:
    """One open engine, and what its trace says of some steps."""

    def __init__(self, folder: Path, graphs: bool, steps: int = STEPS) -> None:
        self.graphs, self.steps = graphs, steps
        self.told = Trace("engine", Path("/nowhere"))  # it is asked, and never saved
        options = EngineOptions(depth=1, swap_bytes=0, drafts=0, graphs=graphs)
        self.engine = Engine.open(folder, options, trace=self.told)
        self.rng = np.random.default_rng(0)

    def run(self, rows: int, context: int = CONTEXT) -> Row:
        """Prefills `rows` sequences, then looks at steps in which all of them decode."""
        engine, vocab = self.engine, min(IDS, self.engine.loaded.limits.vocab)
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        prompts = self.rng.integers(0, vocab, (rows, context)).tolist()
        waiting = {engine.submit(Request(tuple(p), params)) for p in prompts}
        ids = set(waiting)
        while waiting:
            waiting -= {event.request_id for event in engine.step()}
        for _ in range(WARM):
            engine.step()
        before = self.told.shares()
        for _ in range(self.steps):
            engine.step()
        row = self._row(rows, before, self.told.shares())
        for request in ids:
            engine.cancel(request)
        while not engine.idle:
            engine.step()
        return row

    def _row(self, rows: int, before: Row, after: Row) -> Row:
        wall = after["wall_s"] - before["wall_s"]
        busy = after["seconds"]["busy"] - before["seconds"]["busy"]
        parts = {
            name: round((s - before["parts_s"].get(name, 0.0)) * 1e6 / self.steps, 1)
            for name, s in after["parts_s"].items()
        }
        return {
            "rows": rows,
            "graphs": self.graphs,
            "step_ms": round(wall * 1e3 / self.steps, 3),
            "busy": round(min(busy / wall, 1.0), 4),
            "host": round(max(1 - busy / wall, 0.0), 4),
            "host_us": round(sum(v for k, v in parts.items() if k not in ("wait", "idle")), 1),
            "parts_us": parts,
        }


def main() -> None:
    """Prints a line for each row, and keeps them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--rows", default="1,4,8,32,64,128")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    head = {"engine": given.engine.name, "date": date.today().isoformat(), "card": _card()}
    found: list[Row] = []
    for graphs in (True, False):
        shares = Shares(given.engine, graphs)
        for rows in map(int, given.rows.split(",")):
            row = shares.run(rows)
            found.append(row)
            print(line(row), flush=True)
            if given.out:  # at once: a run may be cut off
                given.out.write_text(json.dumps({**head, "rows": found}, indent=1) + "\n")
        shares.engine.close()


def line(row: Row) -> str:
    """A row for a person."""
    parts = " ".join(f"{k} {v:.0f}" for k, v in row["parts_us"].items() if k != "idle")
    shares = f"busy {row['busy']:.1%}, host {row['host']:.1%}"
    kind = "graph" if row["graphs"] else "no graph"
    return f"{kind:8s} {row['rows']:4d} rows {row['step_ms']:7.3f} ms, {shares}; us: {parts}"


def _card() -> str:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
