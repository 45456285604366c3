"""The build half of the `native` executor over all buckets: pack, decide, compile, emit.

Everything that can be refused is refused when it is made, before a byte is written. Kernels of all
buckets are compiled together, since buckets share most of them; where tactics are timed, those
that compete are compiled first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx_graphsurgeon as gs

from spark_engine import device
from spark_engine.builder.graph.lower import Lowered
from spark_engine.builder.graph.nodes import Ops
from spark_engine.builder.native import nvrtc, program
from spark_engine.builder.native.packing import pack
from spark_engine.builder.native.tactics import Chooser, report
from spark_engine.builder.plan.buckets import Size
from spark_engine.builder.plan.options import Plan
from spark_engine.device_buffers import Buffers
from spark_engine.engine_file import EngineHeader
from spark_engine.errors import OptionError
from spark_engine.interface import tables
from spark_engine.manifest import Json
from spark_engine.progress import Advance, ignore
from spark_engine.weights_file import WeightEntry

TIMINGS = ".timings.json"


class NativeBackend:
    """Packs the weights of `families` in place and decides every bucket.

    `cubins` is the folder of compiled kernels; `.timings.json` beside it keeps measurements.
    Raises OptionError when an op has no tactic for the target, when an invariant build finds none
    that all buckets can share, or when timing was asked for and the GPU is another or absent.
    """

    executor = program.EXECUTOR

    def __init__(
        self,
        plan: Plan,
        families: Sequence[Lowered],
        ops: Ops,
        cubins: Path,
        advance: Advance = ignore,
    ) -> None:
        assert plan.gpu is not None
        self._ops, self._target = ops, plan.gpu
        self._limits = plan.limits
        self._cache, self._workers = cubins, min(os.cpu_count() or 1, 16)
        self._advance = advance
        self.notes: tuple[str, ...] = ()
        for lowered in families:
            pack(lowered, ops)
        self._decided = self._decide(plan, families)
        program.check(self._decided.values(), self._target)
        self.tactics: tuple[Json, ...] = tuple(
            row for size, d in self._decided.items() for row in report(size.file, d.nodes)
        )
        jobs = program.jobs(self._decided.values())
        self._cubins = program.compile_jobs(jobs, self._target, cubins, self._workers, advance)

    def _decide(self, plan: Plan, families: Sequence[Lowered]) -> dict[Size, program.Decided]:
        sizes = [(lowered.graph, plan.buckets.of(lowered.family)) for lowered in families]
        if not self._times(plan.timing):
            return self._with(Chooser(self._ops, self._target), sizes, plan.invariant)
        from spark_engine.builder.native.gpu_timer import GpuTimer

        rivals = Chooser(self._ops, self._target).rivals(sizes)
        jobs = nvrtc.jobs_of(rivals)
        program.compile_jobs(jobs, self._target, self._cache, self._workers, self._advance)
        with GpuTimer(self._target, self._cache, self._cache.parent / TIMINGS) as timer:
            chooser = Chooser(self._ops, self._target, timer)
            decided = self._with(chooser, sizes, plan.invariant)
        self.notes = timer.notes
        return decided

    def _with(
        self,
        chooser: Chooser,
        sizes: Sequence[tuple[gs.Graph, Sequence[Size]]],
        invariant: bool,
    ) -> dict[Size, program.Decided]:
        failed: dict[str, str] = {}
        for graph, buckets in sizes if invariant else ():
            failed |= chooser.agree(graph, buckets)
        if failed:
            raise OptionError(
                f"--invariant on {self._target.name}: {'; '.join(failed.values())}; leave buckets "
                "out by --decode or --prefill, or build without it"
            )
        return {
            size: program.decide(graph, size, chooser)
            for graph, buckets in sizes
            for size in buckets
        }

    def _times(self, wish: bool | None) -> bool:
        """Whether tactics are timed: as told, or where the target's card is."""
        if wish is False:
            return False
        present = device.present()
        if present == self._target:
            return True
        if wish:
            here = f"{present.name} ({present.card.name})" if present else "no CUDA GPU of a target"
            raise OptionError(
                f"--timing needs the GPU it builds for: {self._target.name} "
                f"({self._target.card.name}) is asked for, and this machine has {here}"
            )
        return False

    def compile(
        self, lowered: Lowered, size: Size, target: str, weights: Mapping[str, WeightEntry]
    ) -> tuple[EngineHeader, bytes, dict[str, int]]:
        """Launch records and cubins."""
        states = tuple(spec.name for spec, _ in lowered.states)
        header = program.header(lowered.graph, size, target, states)
        decided = self._decided[size]
        payload, memory = program.compile(decided, weights, states, self._ops, self._cubins)
        buffers = Buffers.of(header, (spec.name for spec in tables(self._limits)))
        memory |= {"buffer_bytes": buffers.own_bytes, "wide_bytes": buffers.wide.nbytes}
        return header, payload, memory
