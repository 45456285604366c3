"""The build half of the `native` executor over all buckets: pack, decide, compile, emit.

Everything that can be refused is refused when it is made, before a byte is written. Kernels of all
buckets are compiled together, since buckets share most of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from spark_engine.builder import native
from spark_engine.builder.buckets import Size
from spark_engine.builder.graph import Ops
from spark_engine.builder.lower import Lowered
from spark_engine.builder.options import Plan
from spark_engine.builder.packing import pack
from spark_engine.builder.tactics import Chooser, Timer, report
from spark_engine.engine_file import EngineHeader
from spark_engine.kernel import TARGETS
from spark_engine.manifest import Json
from spark_engine.weights_file import WeightEntry


class NativeBackend:
    """Packs the weights of `families` in place and decides every bucket.

    Raises OptionError when an op has no tactic for the target.
    """

    executor = native.EXECUTOR

    def __init__(
        self,
        plan: Plan,
        families: Sequence[Lowered],
        ops: Ops,
        cubins: Path,
        timer: Timer | None = None,
    ) -> None:
        self._ops, self._target = ops, TARGETS[plan.target]
        chooser = Chooser(ops, self._target, timer)
        self._decided: dict[Size, native.Decided] = {}
        for lowered in families:
            pack(lowered, ops)
            for size in plan.buckets.of(lowered.family):
                self._decided[size] = native.decide(lowered.graph, size, chooser)
        native.check(self._decided.values(), self._target)
        self.tactics: tuple[Json, ...] = tuple(
            row for size, d in self._decided.items() for row in report(size.file, d.nodes)
        )
        jobs = native.jobs(self._decided.values())
        workers = min(os.cpu_count() or 1, 16)
        self._cubins = native.compile_jobs(jobs, self._target, cubins, workers)

    def compile(
        self, lowered: Lowered, size: Size, target: str, weights: Mapping[str, WeightEntry]
    ) -> tuple[EngineHeader, bytes, int]:
        """Launch records and cubins."""
        states = tuple(spec.name for spec, _ in lowered.states)
        header = native.header(lowered.graph, size, target, states)
        decided = self._decided[size]
        payload, nbytes = native.compile(decided, weights, states, self._ops, self._cubins)
        return header, payload, nbytes
