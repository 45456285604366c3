"""The published models' shapes as on the rehearsed GPU: each layer right or wrong, and how long.

A part of `benchmarks.rehearsal`, with drawn weights. Cut to one layer of each kind (`shapes`),
every node of the engine runs alone over what the float64 reference of the node before it made, and
the layers one behind the other (spark-check's levels `op` and `layer`). Whole, each bucket's
launches are timed one by one and as a graph (`benchmarks.time_step --per-launch`), into
`launches.json.xz`, from which `benchmarks.rehearsal.gb10.predict` learns, and a prefill's kinds of
nodes next to their floors (`benchmarks.rehearsal.prefill_floor`).
"""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.rehearsal.check import tell_level
from benchmarks.rehearsal.cut_models import cut
from benchmarks.rehearsal.reporter import LAUNCHES, PREFILLS, Reporter
from benchmarks.result_files import CONFIGS, MODELS, read
from benchmarks.steps.launch_times import of_kinds, of_run
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
    reporter = Reporter()
    base, models = Path(reporter.options["work"]) / "layers", reporter.options.get("models", MODELS)
    here = present()
    reporter.head(fitted_to=here.card.name if here else "no GPU")
    for model in models:
        label = f"{model}/nodes"
        if label not in reporter.done:
            with reporter.trial(label):
                nodes(reporter, label, model, base)
    for model in models:
        label = f"{model}/whole"
        if label not in reporter.done:
            with reporter.trial(label):
                whole(reporter, model, base)
                reporter.row(label, right=True)


def nodes(reporter: Reporter, label: str, model: str, base: Path) -> None:
    """A row for each kind of node and level of the cut model, and one of the whole check."""
    reporter.note(f"building {model}, cut")
    checkpoint, engine = cut(model, base / f"{model}_config"), base / f"{model}_cut"
    build(checkpoint, engine, Options(**CUT), lambda text: None)
    report = run_check(engine, checkpoint, ("op", "layer"), Telling(reporter))
    for level in report.levels:
        row = asdict(level) | {"passed": level.passed}
        if level.name == "op":
            kinds = dict.fromkeys(finding["kind"] for finding in row["findings"])
            for kind in kinds:
                found = [f for f in row["findings"] if f["kind"] == kind]
                part = {**row, "findings": found, "passed": all(f["passed"] for f in found)}
                tell_level(reporter, f"{model}/op/{kind}", part)
        tell_level(reporter, f"{model}/{level.name}", row)
    reporter.row(label, right=report.passed, note="; ".join(report.headlines)[:400])


class Telling(Progress):
    def __init__(self, reporter: Reporter) -> None:
        super().__init__(None)
        self._reporter = reporter

    def _write(self, text: str) -> None:
        self._reporter.note(text.strip())


def whole(reporter: Reporter, model: str, base: Path) -> None:
    """Builds the model in full, times it, and takes it off the disk again: a row a bucket."""
    engine, out = base / model, Path(reporter.options["out"]) / LAUNCHES
    sizes = ("--decode", ROWS, "--prefill", PROMPTS, "--verify", VERIFY)
    try:
        words = (str(CONFIGS / model), "-o", str(engine), *sizes, *FULL)
        heard(reporter, ("spark_engine.builder.cli", *words))
        wanted = ("--per-launch", "--rows", ROWS, "--drafts", DRAFTS, "--prefill", PROMPTS)
        words = (str(engine), str(CONFIGS / model), *wanted, "--steps", "16", "--out", str(out))
        heard(reporter, ("benchmarks.time_step", *words))
        floors = ("--model", model, "--out", str(out.with_name(PREFILLS)))
        heard(reporter, ("benchmarks.rehearsal.prefill_floor", *floors))
    finally:
        shutil.rmtree(engine, ignore_errors=True)
    runs = read(out)["runs"]
    here = present()
    run = next(r for r in runs if (r["model"], r["machine"]["sms"]) == (model, here and here.sms))
    for bucket in filter(of_run, run["buckets"]):
        name = f"{model}/{bucket['family']} {bucket['rows']}"
        reporter.row(name, right=True, graph_ms=bucket["graph_ms"], kinds=of_kinds(bucket))


def heard(reporter: Reporter, words: Sequence[str]) -> None:
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
            reporter.note(line.strip())
    if process.returncode:
        raise RuntimeError(f"{words[0]} ended with code {process.returncode}: {last}")


if __name__ == "__main__":
    main()
