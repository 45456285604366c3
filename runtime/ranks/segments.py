"""One rank's bucket on the CPU: onnxruntime sessions with collectives between them.

Knows the payload of `spark_engine/segments.py` and the communicator; knows no op. Each segment is
tested when it is opened: if it can update its states in place it does, otherwise it writes to
separate memory and copies.
"""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np

from spark_engine.engine_file import EngineHeader
from spark_engine.errors import ExecutorError
from spark_engine.runtime.executors.by_buffers import ByBuffers
from spark_engine.runtime.executors.communicator import Communicator
from spark_engine.runtime.executors.executor import Specs, SynchronousExecutor, checked
from spark_engine.runtime.executors.memory import allocate
from spark_engine.runtime.executors.ort import (
    Arrays,
    BoundSession,
    Run,
    Sessions,
    folds,
    trial_step,
)
from spark_engine.segments import Collective, Segment, Segments
from spark_engine.tensors import Array, TensorSpec


class SegmentsExecutor(SynchronousExecutor):
    """Runs a bucket together with the other ranks. Its states are this rank's.

    Raises EngineError if the payload has another format, or onnxruntime refuses a segment.
    """

    def __init__(
        self,
        header: EngineHeader,
        payload: bytes,
        folder: Path,
        threads: int = 0,
        *,
        comm: Communicator,
        sessions: Sessions | None = None,
    ) -> None:
        self.specs = Specs(header.inputs, header.states, header.outputs)
        self._comm = comm
        self._label = f"{header.family} {header.rows} of rank {comm.rank}"
        segments = Segments.decode(payload)
        self._aliases = dict(header.aliases)
        self._values = {spec.name: allocate(spec) for spec in segments.values}
        known = (*header.inputs, *header.states, *header.outputs, *segments.values)
        specs = {spec.name: spec for spec in known}
        specs |= {out: replace(specs[state], name=out) for out, state in self._aliases.items()}
        shared = sessions or Sessions()

        @cache
        def example() -> Arrays | None:
            arrays = trial_step(header)
            if arrays is None:
                return None
            return self._named(arrays | _random_values(segments.values))

        def opened(step: Segment) -> BoundSession:
            model = step.of_rank(comm.rank)
            found = shared.open(model, folder, threads, self._label, folds(header))
            inputs, outputs = ([specs[n] for n in names] for names in (step.inputs, step.outputs))
            return BoundSession(found, inputs, outputs, example)

        self._steps: tuple[BoundSession | Collective, ...] = tuple(
            opened(step) if isinstance(step, Segment) else step for step in segments.steps
        )
        self._bound = ByBuffers[list[Run]]()

    @property
    def in_place(self) -> bool:
        """Whether every state is updated in place."""
        return all(step.in_place for step in self._steps if isinstance(step, BoundSession))

    def run(self, buffers: Arrays) -> None:
        """Runs one step over `buffers`, together with all ranks.

        Raises ExecutorError if a buffer is missing or misshapen, or a rank does not reach the step.
        """
        for work in self._bound.find(buffers, lambda: self._bind(buffers)):
            work()

    def close(self) -> None:
        self._bound.clear()
        self._steps = ()
        self._values = {}

    def _named(self, arrays: dict[str, Array]) -> dict[str, Array]:
        """The arrays by name, where an updated state has its state's array."""
        return arrays | {out: arrays[state] for out, state in self._aliases.items()}

    def _bind(self, buffers: Arrays) -> list[Run]:
        if not self._steps:
            raise ExecutorError(f"{self._label} is closed")
        for spec in (*self.specs.inputs, *self.specs.states, *self.specs.outputs):
            checked(spec, buffers.get(spec.name))
        arrays = self._named({**buffers, **self._values})
        return [
            step.bind(arrays)
            if isinstance(step, BoundSession)
            else partial(
                self._meet, step.op, arrays[step.output], *(arrays[n] for n in step.inputs)
            )
            for step in self._steps
        ]

    def _meet(self, op: str, out: Array, given: Array, rows: Array | None = None) -> None:
        if op == "all_reduce":
            out[...] = self._comm.all_reduce(given)
        elif rows is None:
            out[...] = np.concatenate([*self._comm.all_gather(given)], axis=-1)
        elif rows.any():
            some = np.flatnonzero(rows)
            out[some] = np.concatenate([*self._comm.all_gather(given[some])], axis=-1)


def _random_values(specs: tuple[TensorSpec, ...]) -> dict[str, Array]:
    """Small random values for tensors between segments."""
    rng = np.random.default_rng(0)
    arrays = {spec.name: allocate(spec) for spec in specs}
    for array in arrays.values():
        array[...] = rng.integers(-8, 8, array.shape, np.int8).astype(array.dtype)
    return arrays
