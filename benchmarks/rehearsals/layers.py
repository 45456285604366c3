"""The published models' shapes as on the rehearsed GPU: each layer right or wrong, and how long.

A part of `benchmarks.rehearsal`, with drawn weights. Cut to one layer of each kind (`shapes`),
every node of the engine runs alone over what the float64 reference of the node before it made, and
the layers one behind the other (spark-check's levels `op` and `layer`). Whole, each bucket's
launches are timed one by one and as a graph (`benchmarks.launch_times`), into
`rehearsal_launches.json`, from which `benchmarks.predict_gb10` learns, and a prefill's kinds of
nodes beside their floors (`benchmarks.prefill_floor`).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.launch_times import of_run
from benchmarks.rehearsals.check import tell_level
from benchmarks.rehearsals.measured import of_script
from benchmarks.rehearsals.shapes import CONFIGS, MODELS, cut
from benchmarks.rehearsals.told import LAUNCHES, PREFILLS, Told
from spark_engine.builder.build import build
from spark_engine.builder.plan.options import Options
from spark_engine.check.check import run_check
from spark_engine.device.gpu import present
from spark_engine.progress import Progress

# Of the cut models: rows of 1 and 8, one tile and two of prefill.
CUT: dict[str, Any] = {"decode": (1, 8), "prefill": (128,), "max_seqs": 8, "max_context": 512}
ROWS, PROMPTS, DRAFTS = "1,8,32,64,128", "4096,8192", "1,3"
FULL = ("--max-context", "9216", "--kv-tokens", "163840", "--no-record")
VERIFY = ",".join(f"{r}:{k}" for r in ROWS.split(",") for k in DRAFTS.split(","))


def main() -> None:
    """Each model cut, then each whole."""
    told = Told()
    told.hold(of_script(Path(__file__)))
    base, models = Path(told.options["work"]) / "layers", told.options.get("models", MODELS)
    here = present()
    told.head(fitted_to=here.card.name if here else "no GPU")
    for model in models:
        label = f"{model}/nodes"
        if label not in told.done:
            with told.trial(label):
                nodes(told, label, model, base)
    for model in models:
        label = f"{model}/whole"
        if label not in told.done:
            with told.trial(label):
                whole(told, model, base)
                told.row(label, right=True)


def nodes(told: Told, label: str, model: str, base: Path) -> None:
    """A row for each kind of node and level of the cut model, and one of the whole check."""
    told.note(f"building {model}, cut")
    checkpoint, engine = cut(model, base / f"{model}_config"), base / f"{model}_cut"
    build(checkpoint, engine, Options(**CUT), lambda text: None)
    report = run_check(engine, checkpoint, ("op", "layer"), Telling(told))
    for level in report.levels:
        row = asdict(level) | {"passed": level.passed}
        if level.name == "op":
            kinds = dict.fromkeys(finding["kind"] for finding in row["findings"])
            for kind in kinds:
                found = [f for f in row["findings"] if f["kind"] == kind]
                part = {**row, "findings": found, "passed": all(f["passed"] for f in found)}
                tell_level(told, f"{model}/op/{kind}", part)
        tell_level(told, f"{model}/{level.name}", row)
    told.row(label, right=report.passed, note="; ".join(report.headlines)[:400])


class Telling(Progress):
    """What spark-check says, as notes."""

    def __init__(self, told: Told) -> None:
        super().__init__(None)
        self._told = told

    def _write(self, text: str) -> None:
        self._told.note(text.strip())


def whole(told: Told, model: str, base: Path) -> None:
    """Builds the model in full, times it, and takes it off the disk again: a row a bucket."""
    engine, out = base / model, Path(told.options["out"]) / LAUNCHES
    sizes = ("--decode", ROWS, "--prefill", PROMPTS, "--verify", VERIFY)
    try:
        words = (str(CONFIGS / model), "-o", str(engine), *sizes, *FULL)
        heard(told, ("spark_engine.builder.cli", *words))
        wanted = ("--rows", ROWS, "--drafts", DRAFTS, "--prefill", PROMPTS, "--out", str(out))
        heard(told, ("benchmarks.launch_times", str(engine), str(CONFIGS / model), *wanted))
        floors = ("--model", model, "--out", str(out.with_name(PREFILLS)))
        heard(told, ("benchmarks.prefill_floor", *floors))
    finally:
        shutil.rmtree(engine, ignore_errors=True)
    runs = json.loads(out.read_text())["runs"]
    here = present()
    run = next(r for r in runs if (r["model"], r["machine"]["sms"]) == (model, here and here.sms))
    for bucket in filter(of_run, run["buckets"]):
        name = f"{model}/{bucket['family']} {bucket['rows']}"
        told.row(name, right=True, graph_ms=bucket["graph_ms"], kinds=of_kinds(bucket))


def of_kinds(bucket: dict[str, Any]) -> list[list[Any]]:
    """[node, op, tactic, launches, microseconds of all] of a bucket, the longest first."""
    found: dict[tuple[str, ...], list[float]] = {}
    for kind, us in bucket["launches"]:
        node, op, tactic, _ = bucket["kinds"][kind]
        found.setdefault((node, op, tactic), []).append(us)
    rows = [[*key, len(us), round(sum(us), 2)] for key, us in found.items()]
    return sorted(rows, key=lambda row: -row[-1])


def heard(told: Told, words: Sequence[str]) -> None:
    """Runs a module; what it prints become notes. Raises RuntimeError where it fails."""
    command = [sys.executable, "-u", "-m", *words]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    last = ""
    assert process.stdout is not None
    with process:
        for line in process.stdout:
            last = line.strip() or last
            told.note(line.strip())
    if process.returncode:
        raise RuntimeError(f"{words[0]} ended with code {process.returncode}: {last}")


if __name__ == "__main__":
    main()
