"""The onnxruntime executor: one session per family of buckets, states updated in place.

Knows the header's specs and onnxruntime; knows no op. Output states are bound to the memory of the
input states, so that onnxruntime's ScatterND writes in place and copies nothing. onnxruntime does
not guarantee this. Each session therefore tests it once on random data when it is opened; if the
test fails, the session runs into separate memory and copies the states back.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import numpy as np

from spark_engine.engine_file import EngineHeader
from spark_engine.errors import EngineError, ExecutorError
from spark_engine.interface import STATE_OUT
from spark_engine.runtime.executors.by_buffers import ByBuffers
from spark_engine.runtime.executors.executor import Specs, SynchronousExecutor, checked
from spark_engine.runtime.executors.memory import allocate
from spark_engine.tensors import Array, DType, TensorSpec
from spark_engine.vision import VISION

if TYPE_CHECKING:
    import onnxruntime as ort

FOLDER_KEY = "session.model_external_initializers_file_folder_path"
Arrays = Mapping[str, Array]
Run = Callable[[], None]
_LOG = logging.getLogger(__name__)


class OrtExecutor(SynchronousExecutor):
    """Runs an ONNX model with external weights in `folder`.

    Raises EngineError if onnxruntime refuses the model. `threads` 0: one per core; `sessions`: the
    engine's.
    """

    def __init__(
        self,
        header: EngineHeader,
        payload: bytes,
        folder: Path,
        threads: int = 0,
        sessions: Sessions | None = None,
    ) -> None:
        self.specs = Specs(header.inputs, header.states, header.outputs)
        self._label = f"{header.family} {header.rows}"
        self._states = dict(header.aliases)
        known = {s.name: s for s in header.states}
        # of several updates of a state the last one is its output
        updates = sorted(self._states, key=lambda out: out == self._states[out] + STATE_OUT)
        updated = (replace(known[self._states[out]], name=out) for out in updates)
        inputs, outputs = (*header.inputs, *header.states), (*header.outputs, *updated)

        def trial() -> Arrays | None:
            arrays = trial_step(header)
            return None if arrays is None else self._named(arrays)

        found = (sessions or Sessions()).open(payload, folder, threads, self._label, folds(header))
        self._session: BoundSession | None = BoundSession(found, inputs, outputs, trial)
        self._bound = ByBuffers[Run]()
        self.in_place = self._session.in_place
        if not self.in_place:
            _LOG.warning("%s: cannot update states in place; each run copies them", self._label)
        _trim_heap()

    def run(self, buffers: Arrays) -> None:
        """Runs one step over `buffers`. Raises ExecutorError if one is missing or misshapen."""
        self._bound.find(buffers, lambda: self._bind(buffers))()

    def close(self) -> None:
        self._bound.clear()
        self._session = None

    def _bind(self, buffers: Arrays) -> Run:
        if self._session is None:
            raise ExecutorError(f"{self._label} is closed")
        for spec in (*self.specs.inputs, *self.specs.states, *self.specs.outputs):
            checked(spec, buffers.get(spec.name))
        return self._session.bind(self._named(buffers))

    def _named(self, arrays: Arrays) -> Arrays:
        """The arrays by name, where an updated state has its state's array."""
        return {**arrays, **{out: arrays[state] for out, state in self._states.items()}}


@dataclass
class SharedSession:
    """A session, and whether it updates states in place; None: it was not tested."""

    session: ort.InferenceSession
    in_place: bool | None = None


class Sessions:
    """An engine's sessions by model. The buckets of a family have one model, for any number of
    rows: they share its session, which has each matrix as f32 once."""

    def __init__(self) -> None:
        self._open = WeakValueDictionary[bytes, SharedSession]()

    def open(
        self, model: bytes, folder: Path, threads: int, label: str, fold: bool = True
    ) -> SharedSession:
        """That of the model, opened if no executor has it. Raises EngineError as `open_session`."""
        key = hashlib.sha256(model).digest()
        found = self._open.get(key)
        if found is None:
            found = SharedSession(open_session(model, folder, threads, label, fold))
            self._open[key] = found
            _trim_heap()
        return found


class BoundSession:
    """A session over named arrays. Inputs and outputs that share memory are updated in place,
    unless a run over the arrays that `trial` makes, which it overwrites, shows that this changes a
    result. Where these are None it is known that it changes none."""

    def __init__(
        self,
        opened: SharedSession,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        trial: Callable[[], Arrays | None],
    ) -> None:
        self._opened, self._session = opened, opened.session
        self._inputs, self._outputs = inputs, outputs
        if opened.in_place is None:
            arrays = trial()
            opened.in_place = arrays is None or self._proves_in_place(arrays)
        self.in_place = opened.in_place

    def bind(self, arrays: Arrays) -> Run:
        """A function that runs it over these arrays."""
        if self.in_place:
            return partial(self._session.run_with_iobinding, self._binding(arrays, arrays))
        apart = self._apart()
        binding = self._binding(arrays, apart)

        def run() -> None:
            self._session.run_with_iobinding(binding)
            for name in self._last(arrays):
                np.copyto(arrays[name], apart[name])

        return run

    def _apart(self) -> dict[str, Array]:
        return {spec.name: allocate(spec) for spec in self._outputs}

    def _last(self, arrays: Arrays) -> Collection[str]:
        """The outputs, of several in one memory the last."""
        return {id(arrays[spec.name]): spec.name for spec in self._outputs}.values()

    def _binding(self, arrays: Arrays, outs: Arrays) -> ort.IOBinding:
        binding = self._session.io_binding()
        for bind, specs, given in (
            (binding.bind_input, self._inputs, arrays),
            (binding.bind_output, self._outputs, outs),
        ):
            for s in specs:
                bind(s.name, "cpu", 0, s.dtype.onnx, s.dims, given[s.name].ctypes.data)
        return binding

    def _proves_in_place(self, trial: Arrays) -> bool:
        """Whether a run in place equals, bit for bit, a run into separate arrays."""
        read = {id(trial[spec.name]) for spec in self._inputs}
        if read.isdisjoint(id(trial[spec.name]) for spec in self._outputs):
            return True
        apart = self._apart()
        self._session.run_with_iobinding(self._binding(trial, apart))
        self._session.run_with_iobinding(self._binding(trial, trial))
        pairs = (zip(trial[name], apart[name], strict=True) for name in self._last(trial))
        return all(a.tobytes() == b.tobytes() for rows in pairs for a, b in rows)  # row by row


def folds(header: EngineHeader) -> bool:
    """Whether a session keeps its matrices as f32. Not the tower's: it runs seldom and for long, so
    that casting them again each time costs little, and several buckets would each have a copy."""
    return header.family != VISION


def open_session(
    payload: bytes, folder: Path, threads: int, label: str, fold: bool = True
) -> ort.InferenceSession:
    """A session over an ONNX model. Without `fold` what depends on weights alone is computed in
    each run, just before it is read. Raises EngineError if onnxruntime refuses the model."""
    import onnxruntime as ort  # here: an engine for a GPU starts without it

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.intra_op_num_threads = threads
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 3  # errors only
    # An arena never frees the memory of its largest step, but without one the heap keeps more: 88
    # MiB in place of 40 after the embedded model's prefills. It would keep weights that runs cast.
    options.enable_cpu_mem_arena = fold
    # Threads that spin between nodes take cores from the frontend and from each other.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry(FOLDER_KEY, str(folder.resolve()))
    if not fold:  # in the graph's order: another one casts all weights first, and holds them
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
    try:
        return ort.InferenceSession(payload, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's classes have no public common base
        raise EngineError(
            f"onnxruntime {ort.__version__} refuses the {label} bucket ({error}): rebuild the "
            "engine with spark-build"
        ) from error


def _trim_heap() -> None:
    """Returns freed memory to the system: folding weights leaves four times their size in the
    allocator, and testing in-place updates leaves the states' size."""
    with contextlib.suppress(OSError, AttributeError):  # the C library is not glibc
        ctypes.CDLL(None).malloc_trim(0)


def trial_step(header: EngineHeader) -> dict[str, Array] | None:
    """The buffers of the step that tests updates in place. None for the tower: its state is read by
    one node alone, the one that writes it, and a trial run would take seconds."""
    return None if header.family == VISION else random_step(header)


def random_step(header: EngineHeader) -> dict[str, Array]:
    """Seeded buffers for one step in which every row is active and has a slot and a page.

    Random values are in the slots and pages that the step may access, and in the scratch ones;
    filling all of a large pool would take longer than loading the engine.
    """
    rng = np.random.default_rng(0)
    arrays = {s.name: allocate(s) for s in (*header.inputs, *header.states, *header.outputs)}
    table = arrays["page_table"]
    live = min(header.rows, len(table) - 1, _page_count(header))
    table.fill(-1)
    table[:live, 0] = rng.permutation(live)
    for spec in header.states:
        if spec.dtype is not DType.I32:  # token ids and counts stay 0
            low = 0 if spec.dtype is DType.U8 else -8  # e4m3 codes below 64 are finite and small
            for part in (arrays[spec.name][:live], arrays[spec.name][-1:]):
                part[...] = rng.integers(low, 8, part.shape, np.int8).astype(part.dtype)
    arrays["slots"].fill(-1)
    arrays["slots"][:live] = rng.permutation(live)
    for name, value in (("starts", 1), ("counts", min(2, header.tile)), ("emit", 1)):
        if name in arrays:
            arrays[name][:live] = value
    if "sources" in arrays:
        arrays["sources"][:] = arrays["slots"]
        arrays["saves"].fill(-1)
    arrays["bias_ids"].fill(-1)
    arrays["sampling_f"][:, :4] = (1, 1, 0, 1)  # sampling without penalties
    return arrays


def _page_count(header: EngineHeader) -> int:
    counts = [s.dims[0] - 1 for s in header.states if s.name.endswith("_pages")]
    return min(counts, default=header.rows)
