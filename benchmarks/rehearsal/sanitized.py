"""Every tactic's cases under compute-sanitizer, as on the rehearsed GPU: memcheck or racecheck.

The parts `memcheck` and `racecheck` of `benchmarks.rehearsal`. The cases are shared out, a tactic
or a piece of one to a process, some processes at a time; kernels are compiled before, outside the
sanitizer, with FOLLOWED (plugins/kernels/common/ptx.cuh): the same barriers in a form that
racecheck can follow. Whether results are right is asked by the part `ops`; here counts what the
tool says.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from benchmarks.graphs import target_here
from benchmarks.rehearsal.ops import CUBINS, Work, asked, label_of, works
from benchmarks.rehearsal.reporter import Reporter
from benchmarks.rehearsal.used_multiprocessors import seen
from spark_engine.builder.native import nvrtc
from spark_engine.device.gpu import Gpu, name_and_driver
from tests.plugins import cuda_node
from tests.plugins.cases.seeded import arrays_of

FOLLOWED = (("FOLLOWED", "1"),)
RAN = "ran.json"  # the labels that ran, next to the file of those that are asked for
SHARE = 40  # plans of one process
LEAST = 2  # processes at once; a third of the cores where that is more
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")


def shares(found: Sequence[Work], done: set[str], size: int = SHARE) -> Mapping[str, list[str]]:
    """The labels of the plans (`op/tactic/case`) by the label of their share (`op/tactic/number`);
    shares in `done` are left out."""
    kinds: dict[str, list[str]] = {}
    for _, _, plans in found:
        for work in plans:
            kinds.setdefault(f"{work.op.name}/{work.tactic.name}", []).append(label_of(work))
    cut = {
        f"{kind}/{i // size}": labels[i : i + size]
        for kind, labels in kinds.items()
        for i in range(0, len(labels), size)
    }
    return {label: labels for label, labels in cut.items() if label not in done}


def followed(work: cuda_node.Planned) -> cuda_node.Planned:
    """The plan with kernels that have barriers which racecheck follows."""
    launches = [replace(n, defines=(*n.defines, *FOLLOWED)) for n in work.plan.launches]
    return replace(work, plan=replace(work.plan, launches=tuple(launches)))


def errors_in(log: str) -> int:
    """The errors or hazards that a log of compute-sanitizer sums up. Raises ValueError where it has
    no sum: the tool did not come to its end."""
    found = _SUMMARY.findall(log)
    if not found:
        raise ValueError(f"no summary in the sanitizer's log: {log.strip()[-300:] or 'empty'}")
    return sum(map(int, found))


def sanitize(tool: str, labels: Sequence[str], kept: Path | None = None) -> tuple[bool, str]:
    """Runs the labels' plans in a process under the tool: whether nothing was found, and a note.
    The log of one that found something is `kept`."""
    with tempfile.TemporaryDirectory() as folder:
        asked, log, ran = (Path(folder) / name for name in ("labels.json", "log", RAN))
        asked.write_text(json.dumps(list(labels)))
        command = ["compute-sanitizer", "--tool", tool, "--log-file", str(log)]
        command += [sys.executable, "-m", "benchmarks.rehearsal.sanitized"]
        process = subprocess.run([*command, str(asked)], capture_output=True, text=True)
        text = log.read_text(errors="replace") if log.is_file() else ""
        if process.returncode:
            return False, f"code {process.returncode}: {process.stderr.strip()[-300:]}"
        try:
            count = errors_in(text)
        except ValueError as error:
            return False, str(error)
        done = json.loads(ran.read_text()) if ran.is_file() else []
        if missing := sorted(set(labels) - set(done)):
            return False, f"{len(missing)} of {len(labels)} never ran: {missing[0]}"
        if count and kept is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(text)
        lines = [line for line in text.splitlines() if "rror:" in line or "azard" in line]
        return not count, f"{count} found: {'; '.join(lines)[:300]}" if count else ""


def run_labels(asked: Path) -> None:
    """The sanitized process: runs each plan twice over poisoned, guarded memory."""
    labels, ran = set(json.loads(asked.read_text())), list[str]()
    target = target_here()
    with closing(Gpu()) as gpu:
        bench = cuda_node.Bench(gpu, target, CUBINS)
        for op, case, plans in works(target, {label.split("/")[0] for label in labels}):
            chosen = [work for work in plans if label_of(work) in labels]
            if chosen:
                arrays = arrays_of(op, case)
                for work in chosen:
                    cuda_node.run(bench, followed(work), arrays)
                    ran.append(label_of(work))
    asked.with_name(RAN).write_text(json.dumps(ran))


def main() -> None:
    """Compiles all kernels, then tells a row for each share as it ends."""
    reporter, target = Reporter(), target_here()
    tool = reporter.options["part"]
    found = list(works(target))
    parts = shares(asked(found, reporter), reporter.done)
    wanted = {label for labels in parts.values() for label in labels}
    missing = (w for _, _, plans in found for w in plans if label_of(w) in wanted)
    plans = [(work.tactic.source, followed(work).plan) for work in missing]
    jobs = nvrtc.jobs_of(plans)
    reporter.note(f"{len(jobs)} compilations")
    nvrtc.compile_all(jobs, target, CUBINS, os.cpu_count() or 1)
    with closing(Gpu()) as gpu:
        reporter.head(**seen(gpu), card=name_and_driver()[0], fitted_to=target.card.name)
    together = reporter.options.get("jobs") or max(LEAST, (os.cpu_count() or 1) // 3)
    logs = Path(reporter.options["out"]) / f"{tool}_logs"
    with ThreadPoolExecutor(together) as pool:
        going = {
            pool.submit(sanitize, tool, labels, logs / f"{re.sub('[/ ]', '_', name)}.log"): name
            for name, labels in parts.items()
        }
        for job in as_completed(going):
            right, note = job.result()
            name = going[job]
            reporter.row(name, right=right, cases=len(parts[name]), note=note)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        run_labels(Path(sys.argv[1]))
    else:
        main()
