"""Whole engines as on the rehearsed GPU: spark-check to the op, and the trial of batches.

A part of `benchmarks.rehearsal`. The embedded model and two random checkpoints are built, plainly
and with --invariant; spark-check holds the embedded one's nodes, layers and texts to its
checkpoint, and 64 ragged requests are served together and alone (tests/runtime/batch_trial.py).
"""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.rehearsal.reporter import Reporter
from spark_engine.device.gpu import present
from spark_engine.runtime.offline.embedded import find_checkpoint
from tests.runtime import batch_trial

_FOUND = re.compile(
    r"(\d+) of (\d+) texts same, (\d+) differ \((\d+) at .*?\), (\d+) of (\d+) logits"
)


def main() -> None:
    reporter = Reporter()
    base, checkpoint = Path(reporter.options["work"]) / "check", find_checkpoint()
    here = present()
    reporter.head(fitted_to=here.card.name if here else "no GPU")
    if "build" not in reporter.done or not base.is_dir():  # it may have been of another machine
        with reporter.trial("build"):
            base.mkdir(parents=True, exist_ok=True)
            batch_trial.prepare(base, str(checkpoint))
            reporter.row("build", right=True)
    with reporter.trial("spark-check"):
        if "spark-check" not in reporter.done:
            spark_check(reporter, base / f"{checkpoint.resolve().parent.name}_plain", checkpoint)
    own = checkpoint.resolve().parent.name  # the embedded model's first
    engines = [p for p in base.iterdir() if p.name.rpartition("_")[2] in batch_trial.KINDS]
    for folder in sorted(engines, key=lambda p: (not p.name.startswith(own), p.name)):
        label = f"batches/{folder.name}"
        if label in reporter.done:
            continue
        with reporter.trial(label):
            said = batch_trial.compare(folder)
            reporter.row(
                label, right=served(said, folder.name), note=said, steps=batch_trial.times(folder)
            )


def spark_check(reporter: Reporter, engine: Path, checkpoint: Path) -> None:
    """A row for each level, and one for the command."""
    words = [str(engine), "--against", str(checkpoint), "--json"]
    module = "spark_engine.check.cli"
    done = subprocess.run([sys.executable, "-m", module, *words], stdout=subprocess.PIPE, text=True)
    report: Mapping[str, Any] = json.loads(done.stdout or "{}")
    for level in report.get("levels", ()):
        tell_level(reporter, f"spark-check/{level['name']}", level)
    right = done.returncode == 0 and bool(report)
    reporter.row("spark-check", right=right, note="; ".join(report.get("modules", ()))[:400])


def tell_level(reporter: Reporter, label: str, level: Mapping[str, Any]) -> None:
    """A row of a level of a report: how many findings, how many failed, the worst figures."""
    findings = level["findings"]
    failed = [f for f in findings if not f["passed"]]
    names = sorted({key for f in findings for key in f["figures"]})
    least = {"cosine", "same"}
    worst = {
        name: (min if name in least else max)(
            f["figures"][name] for f in findings if name in f["figures"]
        )
        for name in names
    }
    note = "; ".join(f"{f['name']}: {f['reason']}" for f in failed)[:400]
    counts = {"findings": len(findings), "failed": len(failed), "launches": level["launches"]}
    reporter.row(label, right=level["passed"], **counts, worst=worst, note=note)


def served(said: str, name: str) -> bool:
    """Whether a trial's line is as it should be: bit for bit of an engine with --invariant, and of
    others no text that parts where the logits did not hold both tokens to be as good."""
    found = _FOUND.search(said)
    if found is None:
        return False
    same, count, differ, ties, bits, all_bits = map(int, found.groups())
    if name.endswith("invariant"):
        return same == count and bits == all_bits
    return differ == ties


if __name__ == "__main__":
    main()
