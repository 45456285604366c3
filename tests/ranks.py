"""Runs a CPU engine of several ranks in one process: a thread for each, and a barrier between.

Written from docs/engine_file.md alone: no process, no executor of the runtime takes part. Whatever
passes between segments is poisoned first, and updated states are copied back.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import TypeVar

import numpy as np
import onnxruntime as ort

from spark_engine.engine_file import EngineHeader, open_folder
from spark_engine.plugins.ops.ranks.all_reduce import summed
from spark_engine.plugins.ops.ranks.gather_logits import gathered
from spark_engine.runtime.engine.load import Loaded
from spark_engine.runtime.executors.executor import Specs, Wait
from spark_engine.runtime.executors.memory import allocate
from spark_engine.runtime.executors.ort import FOLDER_KEY, OrtExecutor
from spark_engine.segments import Segment, Segments
from spark_engine.tensors import Array, TensorSpec

T = TypeVar("T")
REDUCED = {"all_reduce": summed, "gather_logits": gathered, "gather_rows": gathered}


class Rendezvous:
    """Where threads of ranks leave arrays for each other."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._left: list[Array] = [np.zeros(0)] * ranks
        self._barrier = Barrier(ranks, timeout=60)

    def gather(self, rank: int, array: Array) -> tuple[Array, ...]:
        self._left[rank] = array.copy()
        self._barrier.wait()
        found = tuple(self._left)
        self._barrier.wait()
        return found

    def run(self, work: Callable[[int], T]) -> list[T]:
        """`work` of every rank at once; when one fails so do all."""

        def guarded(rank: int) -> T:
            try:
                return work(rank)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.ranks) as pool:
            return [*pool.map(guarded, range(self.ranks))]


class RankExecutor:
    def __init__(
        self, header: EngineHeader, payload: bytes, folder: Path, rank: int, rendezvous: Rendezvous
    ) -> None:
        self.specs = Specs(header.inputs, header.states, header.outputs)
        self._segments, self._rank, self._meeting = Segments.decode(payload), rank, rendezvous
        self._aliases = dict(header.aliases)
        self._values = {spec.name: spec for spec in self._segments.values}
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.intra_op_num_threads = 1
        options.add_session_config_entry(FOLDER_KEY, str(folder.resolve()))
        self._sessions = [
            ort.InferenceSession(step.of_rank(rank), options)
            for step in self._segments.steps
            if isinstance(step, Segment)
        ]

    def run(self, buffers: Mapping[str, Array]) -> None:
        specs = {s.name: s for s in (*self.specs.inputs, *self.specs.states, *self.specs.outputs)}
        specs |= {o: replace(specs[s], name=o) for o, s in self._aliases.items()}
        specs |= self._values
        arrays = {**buffers, **{name: _poisoned(s) for name, s in self._values.items()}}
        arrays |= {o: buffers[s] for o, s in self._aliases.items()}
        sessions = iter(self._sessions)
        for step in self._segments.steps:
            if isinstance(step, Segment):
                _run(next(sessions), step, arrays, specs)
            else:
                rows = arrays[step.rows] != 0 if step.rows else slice(None)
                parts = self._meeting.gather(self._rank, arrays[step.input][rows])
                arrays[step.output][rows] = REDUCED[step.op](parts)

    def launch(self, buffers: Mapping[str, Array]) -> Wait:
        """At once."""
        self.run(buffers)
        return lambda: None

    def launch_to_sample(self, buffers: Mapping[str, Array]) -> Callable[[], Wait]:
        """At once."""
        return lambda: self.launch(buffers)

    def close(self) -> None:
        self._sessions.clear()


def open_ranks(path: Path, rendezvous: Rendezvous) -> list[Loaded]:
    """The engine of each rank, to be run in threads of the rendezvous."""
    folder = open_folder(path, "cpu")
    m = folder.manifest

    def opened(rank: int) -> Loaded:
        executors = {}
        for bucket in m.buckets:
            file = folder.engine(bucket)
            if m.ranks == 1:
                made: object = OrtExecutor(file.header, file.payload, path, 1)
            else:
                made = RankExecutor(file.header, file.payload, path, rank, rendezvous)
            executors[bucket.family, bucket.rows] = made
        return Loaded(m.limits, m.eos_token_ids, m.states, m.tables, executors, folder)  # type: ignore[arg-type]

    return [opened(rank) for rank in range(m.ranks)]


def _run(
    session: ort.InferenceSession,
    step: Segment,
    arrays: Mapping[str, Array],
    specs: Mapping[str, TensorSpec],
) -> None:
    made = {name: allocate(specs[name]) for name in step.outputs}
    binding = session.io_binding()
    for name in step.inputs:
        spec, at = specs[name], arrays[name].ctypes.data
        binding.bind_input(name, "cpu", 0, spec.dtype.onnx, spec.dims, at)
    for name, array in made.items():
        spec = specs[name]
        binding.bind_output(name, "cpu", 0, spec.dtype.onnx, spec.dims, array.ctypes.data)
    session.run_with_iobinding(binding)
    for name, array in made.items():
        np.copyto(arrays[name], array)


def _poisoned(spec: TensorSpec) -> Array:
    array = allocate(spec)
    array.view(np.uint8)[...] = 0xFF  # NaN, and -1
    return array
