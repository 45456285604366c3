"""TensorRT-RTX in the place of its package: an engine is an ONNX model that onnxruntime runs.

It reads and writes a `FakeGpu`'s memory at the addresses that it was given.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import external_data_helper, helper

INPUT, OUTPUT = "input", "output"


def compile_engine(trt: object, model: onnx.ModelProto, weights: Path, label: str) -> bytes:
    """What `builder.executors.trt.compile_engine` makes here: the model with its weights."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    external_data_helper.load_external_data_for_model(made, str(weights.parent))
    return bytes(made.SerializeToString())


def module(gpu: Any) -> ModuleType:
    found = ModuleType("tensorrt_rtx")
    found.__version__ = "1.7.1"  # type: ignore[attr-defined]
    found.ILogger = _Logger  # type: ignore[attr-defined]
    found.TensorIOMode = SimpleNamespace(INPUT=INPUT, OUTPUT=OUTPUT)  # type: ignore[attr-defined]
    found.Runtime = lambda logger: _Runtime(gpu, logger)  # type: ignore[attr-defined]
    return found


def session(model: bytes) -> ort.InferenceSession:
    """Without fusions, one of which knows no quantiser of FP8."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    return ort.InferenceSession(model, options)


class _Logger:
    Severity = SimpleNamespace(ERROR=1, INTERNAL_ERROR=0, WARNING=2)

    def __init__(self) -> None:
        """As TensorRT's, which wants to be called."""


class _Runtime:
    """What is no model is refused in its own words; of `no context` the context is."""

    def __init__(self, gpu: Any, logger: Any) -> None:
        self._gpu, self._logger = gpu, logger

    def deserialize_cuda_engine(self, data: bytes) -> Any:
        self._logger.log(_Logger.Severity.WARNING, "a warning")
        if data.startswith(b"no context: "):
            return SimpleNamespace(create_execution_context=lambda: self._refuse(data[12:]))
        return self._refuse(data) if data.startswith(b"refused") else _Engine(self._gpu, data)

    def _refuse(self, words: bytes) -> None:
        self._logger.log(_Logger.Severity.ERROR, words.decode())


class _Engine:
    def __init__(self, gpu: Any, data: bytes) -> None:
        self.gpu, self.session = gpu, session(data)
        graph = onnx.ModelProto.FromString(data).graph
        held = {w.name for w in graph.initializer}
        inputs = [v for v in graph.input if v.name not in held]
        self.modes = {v.name: INPUT for v in inputs} | {v.name: OUTPUT for v in graph.output}
        self.specs = {v.name: _spec(v) for v in (*inputs, *graph.output)}
        self.num_io_tensors = len(self.specs)

    def get_tensor_name(self, index: int) -> str:
        return [*self.specs][index]

    def get_tensor_mode(self, name: str) -> str:
        return self.modes[name]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.specs[name][1]

    def create_execution_context(self) -> _Context:
        return _Context(self)


class _Context:
    def __init__(self, engine: _Engine) -> None:
        self._engine, self._at = engine, dict[str, int]()

    def set_tensor_address(self, name: str, address: int) -> bool:
        self._at[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        """Runs when the queue has come so far."""
        self._engine.gpu._add(self._run)
        return True

    def _run(self) -> None:
        engine = self._engine
        views = {n: engine.gpu.view(self._at[n], *spec) for n, spec in engine.specs.items()}
        made = engine.session.io_binding()
        for name, view in views.items():
            code = helper.np_dtype_to_tensor_dtype(view.dtype)
            bind = made.bind_input if engine.modes[name] == INPUT else made.bind_output
            bind(name, "cpu", 0, code, view.shape, view.ctypes.data)
        engine.session.run_with_iobinding(made)


def _spec(value: onnx.ValueInfoProto) -> tuple[np.dtype[Any], tuple[int, ...]]:
    kind = value.type.tensor_type
    dims = tuple(d.dim_value for d in kind.shape.dim)
    return np.dtype(helper.tensor_dtype_to_np_dtype(kind.elem_type)), dims
