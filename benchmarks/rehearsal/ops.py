"""Every tactic of every op over all its cases, as on the rehearsed GPU: right or wrong, how long.

A part of `benchmarks.rehearsal`. Bits are asked for twice, between guards and over poisoned outputs
(tests/plugins/cuda_node.py), and held to the op's float64 reference; the microseconds are a
replayed graph's, warm, of the case's small shapes. Cases in f32 activations are refused by all.
"""

import os
import tempfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from benchmarks.graphs import mean_seconds, target_here
from benchmarks.rehearsal.reporter import Reporter
from benchmarks.rehearsal.used_multiprocessors import seen
from spark_engine.builder.native import nvrtc
from spark_engine.device.gpu import Gpu, name_and_driver
from spark_engine.op import Case, Op
from spark_engine.plugins import registry
from spark_engine.tensors import Array
from tests.plugins import cuda_node

CUBINS = Path(tempfile.gettempdir()) / "rehearsal_cubins"
SETS, ROUNDS = 4, 5  # of launches in a graph, and of its replays
Work = tuple[Op, Case, list[cuda_node.Planned]]


def works(bench_target: cuda_node.Target, names: Collection[str] = ()) -> Iterator[Work]:
    """The cases that some tactic takes, of the ops named; of all without names."""
    for op in (op for op in registry.OPS if not names or op.name in names):
        for case in cuda_node.cases_of(op) if op.cuda.tactics else ():
            found = list(cuda_node.planned(op, case, bench_target))
            if found:
                yield op, case, found


def asked(every: Iterable[Work], reporter: Reporter) -> list[Work]:
    """Those of the ops that the command line names; all where it names none."""
    names = reporter.options.get("ops")
    return [work for work in every if names is None or work[0].name in names]


def seconds(bench: cuda_node.Bench, work: cuda_node.Planned, arrays: tuple[Array, ...]) -> float:
    """Of one run of the plan, warm."""
    op, case, plan, gpu = work.op, work.case, work.plan, bench.gpu
    outs = op.infer(case.attrs, cuda_node.specs_of(op, case.attrs, arrays))
    packed = cuda_node.packed_arrays(op, case.attrs, arrays)
    functions = bench.functions(work.tactic.source, plan)
    parts = [packed, outs, plan.scratch]
    with bench.buffers([x.nbytes for part in parts for x in part]) as made:
        for buffer, array in zip(made, packed, strict=False):
            bench.put(buffer, array)
        places, rest = {}, [buffer.address for buffer in made]
        for kind, part in zip(("input", "output", "scratch"), parts, strict=True):
            places[kind], rest = rest[: len(part)], rest[len(part) :]
        for i, at in op.aliases(case.attrs).items():
            places["output"][i] = places["input"][at]
        for buffer in made[len(packed) :]:
            gpu.fill(buffer.address, 0, buffer.nbytes)

        def queued() -> None:
            for _ in range(SETS):
                bench.launch(functions, places)

        return mean_seconds(gpu, queued, ROUNDS) / SETS


def label_of(work: cuda_node.Planned) -> str:
    """`op/tactic/case`."""
    return f"{work.op.name}/{work.tactic.name}/{work.case.label}"


def kernels_of(work: cuda_node.Planned) -> list[tuple[str, nvrtc.Defines, str]]:
    """Source, macros and symbol of each launch."""
    source = work.tactic.source
    return [(n.source or source, n.defines, n.symbol) for n in work.plan.launches]


def main() -> None:
    """Compiles all kernels at once, then runs case by case."""
    reporter, target = Reporter(), target_here()
    cases = [
        w
        for w in asked(works(target), reporter)
        if not {label_of(x) for x in w[2]} <= reporter.done
    ]
    plans = [(work.tactic.source, work.plan) for _, _, found in cases for work in found]
    jobs = nvrtc.jobs_of(plans)
    reporter.note(f"{len(cases)} cases, {len(plans)} plans, {len(jobs)} compilations")

    def advance(done: int, total: int) -> None:
        if done % 50 == 0 or done == total:
            reporter.note(f"{done} of {total} compiled")

    cubins = nvrtc.compile_all(jobs, target, CUBINS, os.cpu_count() or 1, advance=advance)
    usage = {
        (job.source, job.defines, s): u for job, c in cubins.items() for s, u in c.usage.items()
    }
    gpu = Gpu()
    bench = cuda_node.Bench(gpu, target, CUBINS)
    reporter.head(**seen(gpu), card=name_and_driver()[0], fitted_to=target.card.name)
    for op, case, found in cases:
        arrays, want = cuda_node.truth(op, case)
        for work in found:
            label = label_of(work)
            if label in reporter.done:
                continue
            with reporter.trial(label):
                note = cuda_node.compared(bench, work, arrays, want)
                us = seconds(bench, work, arrays) * 1e6
                spills = sum(usage[key].spills for key in kernels_of(work))
                reporter.row(label, right=True, us=round(us, 2), spills=spills, note=note)
    gpu.close()


if __name__ == "__main__":
    main()
