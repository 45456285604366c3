"""The onnxruntime executor: one session per bucket, states updated in place.

Knows the header's specs and onnxruntime; knows no op. Output states are bound to the memory of the
input states, so that onnxruntime's ScatterND writes in place and copies nothing. onnxruntime does
not guarantee this. Each session therefore tests it once on random data when it is opened; if the
test fails, the session runs into separate memory and copies the states back.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort

from spark_engine.engine_file import EngineHeader
from spark_engine.errors import EngineError, ExecutorError
from spark_engine.interface import STATE_OUT
from spark_engine.runtime.executors.executor import Specs, SynchronousExecutor, Wait, checked
from spark_engine.runtime.executors.memory import allocate
from spark_engine.tensors import Array, DType, TensorSpec

FOLDER_KEY = "session.model_external_initializers_file_folder_path"
MAX_BOUND = 4  # sets of buffers that a bucket remembers; an engine has one or two
_LOG = logging.getLogger(__name__)


class OrtExecutor(SynchronousExecutor):
    """Runs an ONNX model with external weights in `folder`.

    Raises EngineError if onnxruntime refuses the model. `threads` 0: one per core.
    """

    def __init__(
        self, header: EngineHeader, payload: bytes, folder: Path, threads: int = 0
    ) -> None:
        self._specs = Specs(header.inputs, header.states, header.outputs)
        self._updated = _updated(header)
        self._label = f"{header.family} {header.rows}"
        self._session: ort.InferenceSession | None = open_session(
            payload, folder, threads, self._label
        )
        _trim_heap()
        # One binding per set of buffers; the reference to the buffers keeps their memory allocated.
        self._bound: list[tuple[Mapping[str, Array], ort.IOBinding]] = []
        self.in_place = True
        if not self._proves_in_place(header):
            self.in_place = False
            _LOG.warning("%s: cannot update states in place; each run copies them", self._label)
        _trim_heap()

    @property
    def specs(self) -> Specs:
        """The buffers `run` expects."""
        return self._specs

    def run(self, buffers: Mapping[str, Array]) -> None:
        """Runs one step over `buffers`. Raises ExecutorError if one is missing or misshapen."""
        if self.in_place:
            self._open().run_with_iobinding(self._binding(buffers))
        else:
            for name, state in self._run_apart(buffers).items():
                np.copyto(buffers[name], state)

    def launch(self, buffers: Mapping[str, Array]) -> Wait:
        """Runs the step; the returned function does nothing."""
        self.run(buffers)
        return _done

    def close(self) -> None:
        """Frees the session. May be called twice."""
        self._bound.clear()
        self._session = None

    def _open(self) -> ort.InferenceSession:
        if self._session is None:
            raise ExecutorError(f"{self._label} is closed")
        return self._session

    def _binding(self, buffers: Mapping[str, Array]) -> ort.IOBinding:
        for known, binding in self._bound:
            if known is buffers:
                return binding
        outs = {s.name: buffers.get(state) for s, state in self._updated.items()}
        binding = self._bind({**buffers, **outs})
        self._bound = [*self._bound[1 - MAX_BOUND :], (buffers, binding)]
        return binding

    def _bind(self, arrays: Mapping[str, Array | None]) -> ort.IOBinding:
        binding = self._open().io_binding()
        for spec in (*self._specs.inputs, *self._specs.states):
            binding.bind_input(spec.name, "cpu", 0, *_pointer(spec, arrays.get(spec.name)))
        for spec in (*self._specs.outputs, *self._updated):
            binding.bind_output(spec.name, "cpu", 0, *_pointer(spec, arrays.get(spec.name)))
        return binding

    def _run_apart(self, buffers: Mapping[str, Array]) -> dict[str, Array]:
        """Runs into separate state memory; returns the updated states by name."""
        apart = {s.name: allocate(s) for s in self._updated}
        self._open().run_with_iobinding(self._bind({**buffers, **apart}))
        updated = self._updated.items()
        return {state: apart[s.name] for s, state in updated if s.name == state + STATE_OUT}

    def _proves_in_place(self, header: EngineHeader) -> bool:
        """True if a run over aliased states equals, bit for bit, a run over separate states."""
        apart, together = random_step(header), random_step(header)
        apart |= self._run_apart(apart)
        self._open().run_with_iobinding(self._bind({**together, **_aliased(header, together)}))
        names = [s.name for s in (*header.states, *header.outputs)]
        return all(_bits_equal(apart[name], together[name]) for name in names)


def open_session(payload: bytes, folder: Path, threads: int, label: str) -> ort.InferenceSession:
    """A session over an ONNX model. Raises EngineError if onnxruntime refuses it."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.intra_op_num_threads = threads
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 3  # errors only
    # Each session would have its own arena, which never frees the memory of its largest step.
    # Without it a step of the embedded model takes 4 % longer alone, and 0.4 % with eight rows.
    options.enable_cpu_mem_arena = False
    # Threads that spin between nodes take cores from the frontend and from each other.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry(FOLDER_KEY, str(folder.resolve()))
    try:
        return ort.InferenceSession(payload, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's classes have no public common base
        raise EngineError(
            f"onnxruntime {ort.__version__} refuses the {label} bucket ({error}): rebuild the "
            "engine with spark-build"
        ) from error


def _trim_heap() -> None:
    """Returns freed memory to the system: folding weights leaves four times their size in the
    allocator, and testing in-place updates leaves the states' size.
    """
    with contextlib.suppress(OSError, AttributeError):  # the C library is not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _pointer(spec: TensorSpec, array: Array | None) -> tuple[int, tuple[int, ...], int]:
    """Element type, shape and address. Raises ExecutorError unless `array` fits the spec."""
    return spec.dtype.onnx, spec.dims, checked(spec, array).ctypes.data


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


def _aliased(header: EngineHeader, arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {s.name: arrays[state] for s, state in _updated(header).items()}


def _updated(header: EngineHeader) -> dict[TensorSpec, str]:
    """(memory shared with a state, output name) of each state update; some states are only read."""
    states = {s.name: s for s in header.states}
    return {
        TensorSpec(out, states[name].dtype, states[name].shape): name
        for out, name in header.aliases.items()
    }


def _bits_equal(a: Array, b: Array) -> bool:
    """Bitwise equality, in which NaN equals itself."""
    return np.array_equal(a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8))


def _done() -> None:
    pass
