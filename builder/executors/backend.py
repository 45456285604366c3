"""`Backend`, the protocol of an executor's build half (`build.py` calls it). Knows none of them.

To compile is to make machine code of CUDA sources, here as everywhere in the builder: who has no
kernels of ours has nothing to pack, to choose or to compile, and is asked to emit alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from spark_engine.builder.graph.family import FamilyGraph
from spark_engine.builder.plan.buckets import Size
from spark_engine.device.startup_lock import silent
from spark_engine.engine_file import EngineHeader
from spark_engine.manifest import Json
from spark_engine.progress import Advance
from spark_engine.weights_file import WeightEntry


class Emitted(NamedTuple):
    """One bucket. `memory`: bytes beside weights, states and tables, by the name of the manifest's
    `Bucket`. `seconds`: of one launch, measured or predicted."""

    header: EngineHeader
    payload: bytes
    memory: dict[str, int]
    seconds: float


class Backend:
    """Turns final graphs into the payloads of buckets; to be made into an executor's own.

    Its module names the class `BACKEND`, which is called with the plan, the ops by name and the
    folder of compiled kernels.

    Attributes:
        executor: who runs them, as the manifest names it.
        kernels: weights are packed, tactics chosen and kernels compiled before `emit`.
        timed: tactics are timed, so that those that compete are compiled before one is chosen.
        tactics: rows of the manifest, once they are chosen.
        notes: sentences for the report.
        sizes: the buckets of a family that were chosen by their cost, where they were.
        weights: the file that holds the weights, written before the first `emit`.
    """

    executor: str
    kernels = False
    timed = False
    tactics: tuple[Json, ...] = ()
    notes: tuple[str, ...] = ()
    sizes: Mapping[str, tuple[Size, ...]] = MappingProxyType({})
    weights: Path

    def compile_candidates(self, graphs: Sequence[FamilyGraph], advance: Advance) -> None:
        """Compiles every kernel of the tactics that compete."""

    def choose(self, graphs: Sequence[FamilyGraph], say: Callable[[str], None] = silent) -> None:
        """Decides every node of every bucket; `say` is told what is waited for. Raises OptionError
        for what cannot be run."""

    def compile(self, advance: Advance) -> None:
        """Compiles the kernels of what was chosen."""

    def emit(self, graph: FamilyGraph, size: Size, weights: Mapping[str, WeightEntry]) -> Emitted:
        """One bucket's header, payload, memory and time."""
        raise NotImplementedError
