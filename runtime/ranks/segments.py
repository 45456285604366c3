"""One rank's bucket on the CPU: onnxruntime sessions with collectives between them.

Knows the payload of `spark_engine/segments.py` and the communicator; knows no op. Each segment is
tested when it is opened: if it can update its states in place it does, otherwise it writes to
separate memory and copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from spark_engine.engine_file import EngineHeader
from spark_engine.errors import ExecutorError
from spark_engine.runtime.executors.executor import Specs, SynchronousExecutor, Wait, checked
from spark_engine.runtime.executors.memory import allocate
from spark_engine.runtime.executors.ort import open_session, random_step
from spark_engine.runtime.ranks.communicator import Communicator
from spark_engine.segments import Collective, Segment, Segments
from spark_engine.tensors import Array, TensorSpec

MAX_BOUND = 4  # sets of buffers that a bucket remembers; an engine has one or two
Arrays = Mapping[str, Array]


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
    ) -> None:
        self._specs = Specs(header.inputs, header.states, header.outputs)
        self._comm = comm
        self._label = f"{header.family} {header.rows} of rank {comm.rank}"
        segments = Segments.decode(payload)
        self._aliases = dict(header.aliases)
        self._values = {spec.name: allocate(spec) for spec in segments.values}
        known = (*header.inputs, *header.states, *header.outputs, *segments.values)
        specs = {spec.name: spec for spec in known}
        for out, state in self._aliases.items():
            specs[out] = TensorSpec(out, specs[state].dtype, specs[state].shape)
        wild = self._named(random_step(header) | _wild(segments.values))
        self._steps: tuple[_Session | Collective, ...] = tuple(
            _Session(step, specs, self._open(step, folder, threads), wild)
            if isinstance(step, Segment)
            else step
            for step in segments.steps
        )
        self._bound: list[tuple[Arrays, list[Any]]] = []

    @property
    def specs(self) -> Specs:
        """The buffers `run` expects."""
        return self._specs

    @property
    def in_place(self) -> bool:
        """True if every state is updated in place."""
        return all(step.in_place for step in self._steps if isinstance(step, _Session))

    def run(self, buffers: Arrays) -> None:
        """Runs one step over `buffers`, together with all ranks.

        Raises ExecutorError if a buffer is missing or misshapen, or a rank does not reach the step.
        """
        for work in self._bind(buffers):
            work()

    def launch(self, buffers: Arrays) -> Wait:
        """Runs the step; the returned function does nothing."""
        self.run(buffers)
        return lambda: None

    def close(self) -> None:
        """Frees the sessions. May be called twice."""
        self._bound.clear()
        self._steps = ()
        self._values = {}

    def _open(self, step: Segment, folder: Path, threads: int) -> Any:
        return open_session(step.of_rank(self._comm.rank), folder, threads, self._label)

    def _named(self, arrays: dict[str, Array]) -> dict[str, Array]:
        """The arrays by name, where an updated state has its state's array."""
        return arrays | {out: arrays[state] for out, state in self._aliases.items()}

    def _bind(self, buffers: Arrays) -> list[Any]:
        for known, bound in self._bound:
            if known is buffers:
                return bound
        if not self._steps:
            raise ExecutorError(f"{self._label} is closed")
        for spec in (*self._specs.inputs, *self._specs.states, *self._specs.outputs):
            checked(spec, buffers.get(spec.name))
        arrays = self._named({**buffers, **self._values})
        made = [
            step.bind(arrays)
            if isinstance(step, _Session)
            else partial(
                self._meet, step.op, arrays[step.output], *(arrays[n] for n in step.inputs)
            )
            for step in self._steps
        ]
        self._bound = [*self._bound[1 - MAX_BOUND :], (buffers, made)]
        return made

    def _meet(self, op: str, out: Array, given: Array, rows: Array | None = None) -> None:
        if op == "all_reduce":
            out[...] = self._comm.all_reduce(given)
        elif rows is None:
            out[...] = np.concatenate([*self._comm.all_gather(given)], axis=-1)
        elif rows.any():
            some = np.flatnonzero(rows)
            out[some] = np.concatenate([*self._comm.all_gather(given[some])], axis=-1)


class _Session:
    """One segment; `wild` holds arrays of all names for the in-place test, which
    overwrites them.
    """

    def __init__(
        self, step: Segment, specs: Mapping[str, TensorSpec], session: Any, wild: Arrays
    ) -> None:
        self._step, self._specs, self._session = step, specs, session
        self.in_place = True
        self.in_place = self._proves_in_place(wild)

    def bind(self, arrays: Arrays) -> Any:
        """A function that runs it over these arrays."""
        if self.in_place:
            return partial(self._session.run_with_iobinding, self._binding(arrays, arrays))
        apart = {name: allocate(self._specs[name]) for name in self._step.outputs}
        binding = self._binding(arrays, apart)

        def run() -> None:
            self._session.run_with_iobinding(binding)
            for name, array in apart.items():
                np.copyto(arrays[name], array)

        return run

    def _binding(self, arrays: Arrays, outs: Arrays) -> Any:
        binding = self._session.io_binding()
        for name in self._step.inputs:
            spec, at = self._specs[name], arrays[name].ctypes.data
            binding.bind_input(name, "cpu", 0, spec.dtype.onnx, spec.dims, at)
        for name in self._step.outputs:
            spec, at = self._specs[name], outs[name].ctypes.data
            binding.bind_output(name, "cpu", 0, spec.dtype.onnx, spec.dims, at)
        return binding

    def _proves_in_place(self, wild: Arrays) -> bool:
        """True if a run in place equals, bit for bit, a run into separate arrays."""
        if not any(wild[a] is wild[b] for a in self._step.inputs for b in self._step.outputs):
            return True
        apart = {name: allocate(self._specs[name]) for name in self._step.outputs}
        self._session.run_with_iobinding(self._binding(wild, apart))
        self._session.run_with_iobinding(self._binding(wild, wild))
        return all(wild[name].tobytes() == array.tobytes() for name, array in apart.items())


def _wild(specs: tuple[TensorSpec, ...]) -> dict[str, Array]:
    """Small random values for tensors between segments."""
    rng = np.random.default_rng(0)
    arrays = {spec.name: allocate(spec) for spec in specs}
    for array in arrays.values():
        array[...] = rng.integers(-8, 8, array.shape, np.int8).astype(array.dtype)
    return arrays
