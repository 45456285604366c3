"""The build half of the `native` executor over all buckets: choose, compile, emit.

Everything that can be refused is refused by `choose`, before a byte is written. Kernels of all
buckets are compiled together, since buckets share most of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from spark_engine.builder.executors.backend import Backend, Emitted
from spark_engine.builder.executors.header import header
from spark_engine.builder.graph.family import FamilyGraph
from spark_engine.builder.graph.nodes import Ops
from spark_engine.builder.native import no_tactic, nvrtc, program
from spark_engine.builder.native.early import begin_early, may_gain, untimed
from spark_engine.builder.native.tactics import Chooser, Chosen, Work, report
from spark_engine.builder.plan.bucket_choice import choose
from spark_engine.builder.plan.buckets import Size
from spark_engine.builder.plan.options import BuildPlan, timed_by_default
from spark_engine.device import gpu
from spark_engine.device.buffers import Buffers
from spark_engine.device.startup_lock import silent
from spark_engine.errors import OptionError
from spark_engine.interface import DECODE, PREFILL, VERIFY, tables
from spark_engine.manifest import NATIVE
from spark_engine.progress import Advance
from spark_engine.weights_file import WeightEntry

TIMINGS = ".timings.json"
LEAST_GAIN = 0.002  # share of a bucket's time; less is as two measurements of one graph differ
Start = Callable[[Sequence[nvrtc.Job]], None]  # begins to compile
Whole = Callable[[Sequence[Sequence[Chosen]]], list[float] | None]  # seconds by variant


class NativeBackend(Backend):
    """Chooses the tactics of every bucket of packed graphs.

    `cubins` is the folder of compiled kernels; `.timings.json` next to it keeps measurements.
    Raises OptionError if timing was requested and the GPU is absent or another one. `choose` raises
    it if an op has no tactic for the target, or an invariant build none for all buckets.
    """

    executor = NATIVE
    kernels = True

    def __init__(self, plan: BuildPlan, ops: Ops, cubins: Path) -> None:
        assert plan.gpu is not None
        self._plan, self._ops, self._target = plan, ops, plan.gpu
        self._cache = cubins
        self._workers = max(1, min((os.cpu_count() or 1) - 1, 16))  # one core times tactics
        self._early: dict[Size, tuple[program.BucketTactics, ...]] = {}
        self.timed = self._times(plan.timing)

    def choose(self, graphs: Sequence[FamilyGraph], say: Callable[[str], None] = silent) -> None:
        """Chooses tactics by their times on this machine's GPU, or by their predictions."""
        if self.timed:
            from spark_engine.builder.native.gpu_timer import GpuTimer

            known = self._cache.parent / TIMINGS
            made = nvrtc.Compiler(self._target, self._cache, self._workers)
            with made, GpuTimer(self._target, self._cache, known, say, compiled=made) as timer:
                chooser = Chooser(self._ops, self._target, timer)
                for g in graphs:
                    sizes = *self._sizes(g), *self._finer(g)
                    made.start(nvrtc.jobs_of(chooser.candidates([(g.graph, sizes)])))
                self._decided = self._decide(graphs, chooser, made.start)
                start = time.perf_counter()
                added = [size for g in graphs for size in self._add_finer(g, chooser)]
                taken = time.perf_counter() - start
                early = self._begin_early(chooser, timer.whole, made.start)
            finer = _finer_note(added, len(self._plan.finer), taken)
            self.notes = (*timer.notes, *finer, *early)
        else:
            chooser = Chooser(self._ops, self._target)
            self._decided = self._decide(graphs, chooser)
            self._begin_early(chooser)
        if self._plan.across:
            program.check_across(self._decided.values())
        self.tactics = tuple(
            row for size, d in self._decided.items() for row in report(size.file, d.nodes)
        )

    def compile(self, advance: Advance) -> None:
        jobs = program.jobs(self._decided.values())
        self._cubins = program.compile_jobs(jobs, self._target, self._cache, self._workers, advance)

    def emit(self, graph: FamilyGraph, size: Size, weights: Mapping[str, WeightEntry]) -> Emitted:
        made = header(graph, size, self.executor, self._target.name)
        payload, memory = program.encode(
            self._decided[size], weights, graph.state_names, self._ops, self._cubins
        )
        buffers = Buffers.of(made, (spec.name for spec in tables(self._plan.limits)))
        memory |= {"buffer_bytes": buffers.own_bytes, "wide_bytes": buffers.wide.nbytes}
        return Emitted(made, payload, memory, self._decided[size].seconds)

    def _sizes(self, graph: FamilyGraph) -> tuple[Size, ...]:
        return self._plan.buckets.of(graph.family)

    def _finer(self, graph: FamilyGraph) -> tuple[Size, ...]:
        return tuple(size for size in self._plan.finer if size.family == graph.family)

    def _add_finer(self, graph: FamilyGraph, chooser: Chooser) -> tuple[Size, ...]:
        """Returns the plan's sizes and those between them that pay."""
        family, base, found = graph.family, self._sizes(graph), dict[Size, program.BucketTactics]()

        def cost(rows: int) -> float:
            size = Size(family, rows)
            if size not in self._decided:
                found[size] = program.decide(graph.graph, size, chooser)
            return (self._decided.get(size) or found[size]).seconds

        rows, finer = [s.rows for s in base], [s.rows for s in self._finer(graph)]
        kept = choose(rows, finer, cost, splits=family == PREFILL)
        self.sizes = {**self.sizes, family: tuple(Size(family, r) for r in kept)}
        added = tuple(size for size in found if size.rows in kept)
        self._decided |= {size: found[size] for size in added}
        return added

    def _begin_early(
        self, chooser: Chooser, whole: Whole | None = None, start: Start | None = None
    ) -> tuple[str, ...]:
        """Starts launches early in the buckets of decode and of rounds where that takes less time:
        by `whole`, where given, and by a rule otherwise; always where ranks read each other's
        memory. Returns a note for the report. Refuses nodes without a tactic first."""
        no_tactic.check(self._decided.values(), self._target, self._ops)
        if self._plan.across:
            return ()
        steps = {size: bucket for size, bucket in self._decided.items() if _steps(size)}
        if self._plan.ranks > 1:
            self._decided |= {s: begin_early(bucket, chooser) for s, bucket in steps.items()}
            return ()
        begin = time.perf_counter()
        forms = {s: self._forms(b, chooser, start) for s, b in steps.items() if may_gain(b)}
        gains: dict[Size, float] = {}
        for size, buckets in forms.items():
            found = None if whole is None else whole(_chosen(chooser, buckets))
            if found is None:
                self._decided[size] = buckets[untimed(size, self._target)]
            elif (gain := 1 - min(found) / found[0]) > LEAST_GAIN:
                self._decided[size], gains[size] = buckets[found.index(min(found))], gain
        return _early_note(gains, len(forms), time.perf_counter() - begin) if whole else ()

    def _forms(
        self, bucket: program.BucketTactics, chooser: Chooser, start: Start | None
    ) -> tuple[program.BucketTactics, ...]:
        """The bucket, and with launches that begin early, with deeper rings and without, which
        `start` begins to compile. They are kept."""
        if bucket.size not in self._early:
            found = bucket, begin_early(bucket, chooser), begin_early(bucket, chooser, deep=False)
            if start is not None:
                start(program.jobs(found))
            self._early[bucket.size] = found
        return self._early[bucket.size]

    def _decide(
        self, graphs: Sequence[FamilyGraph], chooser: Chooser, start: Start | None = None
    ) -> dict[Size, program.BucketTactics]:
        """Decides the plan's buckets. `start`, where given, begins to compile the forms of each."""
        failed: dict[str, str] = {}
        for prefill in (False, True) if self._plan.invariant else ():
            alike = [g for g in graphs if (g.family == PREFILL) is prefill]
            failed |= chooser.agree([(g.graph, self._sizes(g)) for g in alike])
        if failed:
            raise OptionError(
                f"--invariant on {self._target.name}: {'; '.join(failed.values())}; leave buckets "
                "out by --decode, --prefill or --verify, or build without it"
            )
        decided: dict[Size, program.BucketTactics] = {}
        alone = self._plan.ranks == 1 and not self._plan.across
        for of, size in ((g, size) for g in graphs for size in self._sizes(g)):
            bucket = decided[size] = program.decide(of.graph, size, chooser)
            if start and alone and _steps(size) and may_gain(bucket) and bucket.complete:
                self._forms(bucket, chooser, start)
        return decided

    def _times(self, requested: bool | None) -> bool:
        """True if tactics are timed: as requested, or where this machine has the target's card."""
        if not (timed_by_default(self._target) if requested is None else requested):
            return False
        present = gpu.present()
        if present == self._target:
            return True
        if requested:
            here = (
                f"{present.name} ({present.card.name})" if present else "no GPU of a known target"
            )
            raise OptionError(
                f"--timing needs the GPU it builds for: {self._target.name} "
                f"({self._target.card.name}) is asked for, and this machine has {here}"
            )
        return False


def _steps(size: Size) -> bool:
    """True for a bucket of decode or of rounds."""
    return size.family == DECODE or size.family.startswith(VERIFY)


def _chosen(chooser: Chooser, buckets: Sequence[program.BucketTactics]) -> list[list[Chosen]]:
    """The nodes of each of these forms of one bucket; those of one decision are one `Work`."""
    decisions, works = dict[int, Work](), dict[int, Work]()
    for node, choice in buckets[0].nodes:
        if id(choice) not in decisions:
            decisions[id(choice)] = chooser.work(node, buckets[0].size)[1]
        works[id(node)] = decisions[id(choice)]
    found = []
    for bucket in buckets:
        found.append(list[Chosen]())
        for node, choice in bucket.nodes:
            assert choice.tactic is not None and choice.plan is not None
            found[-1].append((works[id(node)], choice.tactic, choice.plan))
    return found


def _early_note(gains: Mapping[Size, float], asked: int, seconds: float) -> tuple[str, ...]:
    """A note for the report: in which buckets launches begin early, and what that saves."""
    if not asked:
        return ()
    names = ", ".join(f"{s.file.removesuffix('.engine')} ({g:.1%})" for s, g in gains.items())
    found = f"{names} of {asked} buckets take less time" if gains else f"none of {asked} gains"
    return (f"with launches that begin early {found}, which took {seconds:.1f} s to find",)


def _finer_note(added: Sequence[Size], asked: int, seconds: float) -> tuple[str, ...]:
    """A note for the report: which buckets were added, and how long the search took."""
    if not asked:
        return ()
    names = ", ".join(size.file.removesuffix(".engine") for size in added)
    found = f"{names} of {asked} finer buckets save" if added else f"none of {asked} saves"
    return (
        f"{found} a tenth of a launch, which took {seconds:.1f} s to find; --decode and --prefill "
        "name buckets instead",
    )


BACKEND = NativeBackend
