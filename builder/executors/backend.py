"""What the straight line asks of an executor's build half, and the one for onnxruntime.

Knows no CUDA: `native/backend.py` is the other one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from spark_engine.builder.executors import ort
from spark_engine.builder.graph.lower import Lowered
from spark_engine.builder.graph.memory import lifetimes, place
from spark_engine.builder.plan.buckets import Size
from spark_engine.engine_file import EngineHeader
from spark_engine.manifest import Json
from spark_engine.plugins.registry import REGISTRY
from spark_engine.weights_file import WeightEntry


class Backend(Protocol):
    """Compiles buckets of graphs that are legal and final."""

    @property
    def executor(self) -> str:
        """The executor that runs them."""
        ...

    @property
    def tactics(self) -> tuple[Json, ...]:
        """Rows of the manifest."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the report."""
        ...

    def compile(
        self, lowered: Lowered, size: Size, target: str, weights: Mapping[str, WeightEntry]
    ) -> tuple[EngineHeader, bytes, dict[str, int]]:
        """Header, payload, and bytes of memory beside weights, states and tables, by the name of
        the manifest's `Bucket`."""
        ...


class OrtBackend:
    """The CPU's."""

    executor = ort.EXECUTOR
    tactics: tuple[Json, ...] = ()
    notes: tuple[str, ...] = ()

    def compile(
        self, lowered: Lowered, size: Size, target: str, weights: Mapping[str, WeightEntry]
    ) -> tuple[EngineHeader, bytes, dict[str, int]]:
        """An ONNX model. onnxruntime places nothing by our plan, but takes no more.

        `buffer_bytes` is what a session holds, `arena_bytes` what one may take for a while beside.
        """
        states = tuple(spec.name for spec, _ in lowered.states)
        arena = place(lifetimes(lowered.graph, REGISTRY, size.dims))
        header = ort.header(lowered.graph, size, target, states)
        payload = ort.compile(lowered.graph, size, weights, REGISTRY)
        held = ort.held_bytes((w.spec for w in lowered.weights.values()), payload)
        passing = arena.nbytes + ort.PASSING * held
        return header, payload, {"arena_bytes": passing, "buffer_bytes": held}
