"""The checklist's rows on serving: what each asks for, what was measured, and how.

Knows the rows, and where in a result file a row's figures stand. The files are those that the
named commands write, one for each model: `results/NAME_27b.json` and `..._35b.json`, NAME being
that of COMMANDS. A row without its file says so; a row that tests hold names them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
MODELS = {"27b": "27B", "35b": "35B"}
MISSING = "not measured"
Found = Mapping[str, Any]  # of one file
STEPS, LOADS, PREFIX, REPEAT = "steps", "loads", "prefix", "repeat"
SERVED = "served"
COMMANDS = {
    STEPS: "python -m benchmarks.step_shares ENGINE --rows 1,4,8,32,64,128",
    REPEAT: "spark-check ENGINE --repeat 4 --json",
    LOADS: "python -m benchmarks.served_load ENGINE",
    PREFIX: "python -m benchmarks.prefix_load ENGINE",
    SERVED: "python -m benchmarks.served_rows ENGINE",
}
WIDEST = 128  # rows, of what is told of one width; or the most there are


@dataclass(frozen=True)
class ServingRow:
    """One row. `file` holds the figures that `told` puts in words; without, `command` makes them,
    or `held` names the tests that hold it on a CPU."""

    number: int
    asked: str
    file: str = ""
    told: Callable[[Found], str] = str
    command: str = ""
    held: str = ""

    def shown(self) -> tuple[str, str]:
        """What was found, and the command."""
        command = COMMANDS.get(self.file, self.command)
        paths = {name: RESULTS / f"{self.file}_{model}.json" for model, name in MODELS.items()}
        found = [
            f"{name}: {self.told(json.loads(path.read_text()))}"
            for name, path in paths.items()
            if self.file and path.is_file()
        ]
        if not found and (self.file or not self.held):
            found = [MISSING]
        return "; ".join([*found, *filter(None, [self.held])]), f"`{command}`"


def _widest(found: Found) -> Mapping[str, Any]:
    """The row with graphs of WIDEST rows, or of most."""
    rows = [row for row in found["rows"] if row["graphs"]]
    return max(rows, key=lambda row: (row["rows"] <= WIDEST, row["rows"]))


def _step(found: Found, graphs: bool) -> dict[int, float]:
    """Milliseconds of a step by width."""
    return {row["rows"]: row["step_ms"] for row in found["rows"] if row["graphs"] is graphs}


def _graphs(found: Found) -> str:
    ours, apart = _step(found, True), _step(found, False)
    both = [n for n in ours if n in apart]
    pairs = ", ".join(f"{ours[n]:.2f} / {apart[n]:.2f}" for n in both)
    return f"{pairs} ms a step with / without at {', '.join(map(str, both))}"


def _signals(found: Found) -> str:
    row = _widest(found)
    busy, host = row["busy"], row["host"]
    return f"at {row['rows']} launches run {busy:.1%} of the time, the host alone {host:.1%}"


def _host(found: Found) -> str:
    row = _widest(found)
    return f"{row['host_us'] / 1e3:.2f} ms a step at {row['rows']}"


def _fill(found: Found) -> str:
    row = _widest(found)
    fill = row["parts_us"].get("fill", 0.0) / 1e3
    return f"{fill:.3f} ms, {fill / row['step_ms']:.1%} of a step"


def _split(found: Found) -> str:
    row = _widest(found)
    parts = (f"{name} {us:.0f}" for name, us in row["parts_us"].items() if name != "idle")
    return f"at {row['rows']}: {', '.join(parts)} us"


def _four_and_eight(found: Found) -> str:
    step = _step(found, True)
    if not {4, 8} <= step.keys():
        return MISSING
    return f"{step[8]:.2f} ms of 8 rows, {step[8] / step[4]:.2f} times that of 4"


def _parted(found: Found) -> str:
    runs, texts = found["runs"], found["texts"]
    parted = sum(texts - run["same"] for run in runs)
    agreed = min(run["agreement"] for run in runs)
    after = f"in the worst run after {agreed:.1%} of a text (mean)"
    return f"{parted} of {texts * len(runs)} texts diverge, {after}"


def _staggered(found: Found) -> str:
    share = found["apart"] / found["lockstep"]
    return f"{found['apart']:,.0f} tokens/s, {share:.1%} of lockstep"


def _policies(found: Found) -> str:
    rows = {name: found[f"mixed, {name}"] for name in ("balanced", "throughput")}
    told = (
        f"{name} {row['rate']:,.0f} tokens/s, gaps p50 / p90 / p99 "
        f"{' / '.join(f'{1e3 * gap:.0f}' for gap in row['gaps'])} ms"
        for name, row in rows.items()
    )
    return "mixed load: " + ", ".join(told)


def _beside(found: Found) -> str:
    told = []
    for name in ("balanced", "latency"):
        row = found[f"beside, {name}"]["long"]
        gaps = sorted(row["gaps"])
        p99 = gaps[min(len(gaps) - 1, int(len(gaps) * 0.99))]
        told.append(f"{name} {1e3 * p99:.1f} ms p99, {p99 / row['idle']:.1f} idle steps")
    return ", ".join(told)


def _bursts(found: Found) -> str:
    first, last = found["bursts"][0], found["bursts"][-1]
    return f"{last:,.0f} prompt tokens/s in the tenth, {last / first:.1%} of the first"


def _forks(found: Found) -> str:
    return f"{found['computed']['fork']:,} tokens computed"


def _arrivals(found: Found) -> str:
    rows = found["beside, balanced"]
    beyond = [row["beyond"] for name, row in rows.items() if name.startswith("short")]
    return f"{max(beyond):.1f} steps beyond its chunks', the worst of {len(beyond)}"


def _each(found: Found) -> str:
    rates = (f"{row['tok_s_each'][0]:.1f}" for row in found["rows"])
    return f"{' / '.join(rates)} tokens/s each"


def _firsts(found: Found) -> str:
    rows = [row for row in found["rows"] if row["rows"] in (8, 32, 128)]
    p50, p99 = (
        " / ".join(f"{row[f'ttft_{p}_ms'][0] / 1e3:.2f}" for row in rows) for p in ("p50", "p99")
    )
    return f"p50 {p50} s, p99 {p99} s"


ROWS = (
    ServingRow(8, "CUDA graphs on and off at each width", STEPS, _graphs),
    ServingRow(
        19, "prove what bounds before scheduling changes: GPU busy, host, graphs made", STEPS,
        _signals, held="graphs are made at the start alone",
    ),
    ServingRow(20, "staggered serving >= 90 % of lockstep at equal live width", LOADS, _staggered),
    ServingRow(22, "host <= 0.5 ms a step", STEPS, _host),
    ServingRow(23, "pacing judged by rate and gaps together, with its spread", LOADS, _policies),
    ServingRow(24, "filling the inputs, before a second buffer is thought of: < 2 %", STEPS, _fill),
    ServingRow(
        28, "tokens/s a sequence at 8 / 32 / 64 / 128, beside vLLM's 44.8 / 17.45 / 11.07 / 6.87 "
        "on a GB10", SERVED, _each,
    ),
    ServingRow(29, "32 prompts with 4k in common compute it once: <= 6,144", PREFIX, _forks),
    ServingRow(30, "gap p99 during an 8k prefill <= 2 idle steps", LOADS, _beside),
    ServingRow(
        31, "decode rows are never dropped, and prefill does not starve",
        command="pytest tests/runtime/engine -k 'pacing or scheduler or traces'",
        held="held by generated traces",
    ),
    ServingRow(32, "bursts x 10: the tenth >= 97 % of the first", LOADS, _bursts),
    ServingRow(35, "the host's parts of a step (also `spark-run --profile FILE`)", STEPS, _split),
    ServingRow(
        36, "an md5 of greedy outputs for each engine and bucket, in its manifest",
        command="spark-check ENGINE --level record",
        held="of every bucket on a GPU, of the least two on a CPU but with `--record`; by tests",
    ),
    ServingRow(37, "how often a plain build parts from itself", REPEAT, _parted),
    ServingRow(42, "a step of 8 rows <= 1.10 times one of 4", STEPS, _four_and_eight),
    ServingRow(46, "first token of an arrival beside 64 <= its chunks + 2 steps", LOADS, _arrivals),
    ServingRow(
        52, "schedule, launch, sample, ids back: a trace of each step",
        command="spark-run ENGINE --serve --profile trace.json",
        held="held by tests/runtime/engine/test_trace.py",
    ),
    ServingRow(
        58, "first tokens at 8 / 32 / 128 at once, beside vLLM's 0.27 / 0.77 / 2.5 s on a GB10",
        SERVED, _firsts,
    ),
)  # fmt: skip


def checklist_rows() -> list[tuple[object, ...]]:
    """The table's cells: number, what is asked, what was found, the command."""
    return [(row.number, row.asked, *row.shown()) for row in ROWS]
