"""`Backend`, the protocol of an executor's build half, which `build.py` calls.

In the builder, "compile" means to make cubins from CUDA sources. A backend without CUDA kernels
packs, chooses and compiles nothing; only its `emit` is called.
"""

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
    """One bucket. `memory`: bytes in addition to weights, states and tables, by field of the
    manifest's `Bucket`. `seconds`: of one launch, measured or predicted."""

    header: EngineHeader
    payload: bytes
    memory: dict[str, int]
    seconds: float


class Backend:
    """Turns final graphs into the payloads of buckets. Each executor's backend subclasses it.

    Its module names the class `BACKEND`, which is called with the plan, the ops by name and the
    folder of compiled kernels.

    Attributes:
        executor: the executor's name in the manifest.
        kernels: weights are packed, tactics chosen and kernels compiled before `emit`.
        timed: `choose` compares tactics by their times, for which it compiles them.
        tactics: rows of the manifest, after `choose`.
        notes: sentences for the report.
        sizes: the buckets of each family if their cost decided them.
        weights: the file that holds the weights, written before the first `emit` without `kernels`.
    """

    executor: str
    kernels = False
    timed = False
    tactics: tuple[Json, ...] = ()
    notes: tuple[str, ...] = ()
    sizes: Mapping[str, tuple[Size, ...]] = MappingProxyType({})
    weights: Path

    def choose(self, graphs: Sequence[FamilyGraph], say: Callable[[str], None] = silent) -> None:
        """Chooses a tactic for every node of every bucket; `say` receives progress messages. Raises
        OptionError for a node that no tactic runs."""

    def compile(self, advance: Advance) -> None:
        """Compiles the kernels of the chosen tactics."""

    def emit(self, graph: FamilyGraph, size: Size, weights: Mapping[str, WeightEntry]) -> Emitted:
        """One bucket's header, payload, memory and time."""
        raise NotImplementedError
