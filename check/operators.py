"""Every node of an engine alone: the executor's body against the op's float64 reference.

Operands are recorded while the reference executor runs a launch, so they are what the node meets
in a network, and an error of one node does not reach the next. Knows onnxruntime.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import helper

from spark_engine.check.compare import Verdict
from spark_engine.check.metrics import distance
from spark_engine.check.observe import EMITTED
from spark_engine.check.reference import Step
from spark_engine.check.thresholds import Thresholds
from spark_engine.errors import OptionError
from spark_engine.interface import STATE_OUT
from spark_engine.tensors import DType

MOST_OTHER_CODES = 0.005  # part of packed codes that may round to a neighbour


@dataclass(frozen=True)
class Recorded:
    """One node and what it read and wrote in a launch of the reference."""

    step: Step
    operands: tuple[NDArray[Any], ...]
    results: tuple[NDArray[Any], ...]


@dataclass(frozen=True)
class Masks:
    """Which rows and tokens of a launch have defined values, and which outputs are states."""

    rows: NDArray[np.bool_]
    tokens: NDArray[np.bool_]
    emitting: NDArray[np.bool_]
    states: frozenset[str]

    @classmethod
    def of(cls, buffers: Mapping[str, NDArray[Any]], tile: int, states: Iterable[str]) -> Masks:
        """From the launch's step inputs and the names of the engine's states."""
        counts = buffers["counts"]
        tokens = np.asarray(np.arange(tile) < counts[:, None]).reshape(-1)
        rows = np.asarray(counts > 0)
        emitting = rows & np.asarray(buffers["emit"] == 1)
        return cls(rows, tokens, emitting, frozenset(name + STATE_OUT for name in states))


class Bodies:
    """Runs single nodes of one payload on onnxruntime."""

    def __init__(self, payload: bytes, weights: Mapping[str, NDArray[Any]]) -> None:
        model = onnx.load_from_string(payload)
        self._nodes = {node.name: node for node in model.graph.node}
        self._functions = {f.name: f for f in model.functions}
        self._opsets = list(model.opset_import)
        self._ir_version = model.ir_version
        self._weights = weights

    def run(self, recorded: Recorded) -> tuple[NDArray[Any], ...]:
        """The node's outputs for the recorded operands and the payload's own weights.

        Raises OptionError when the payload has no such node.
        """
        step = recorded.step
        if step.name not in self._nodes:
            raise OptionError(
                f"the engine has no node {step.name}: it was built by another version, so its "
                "nodes cannot be checked one by one; use --level layer"
            )
        named = zip(step.inputs, recorded.operands, strict=True)
        operands = {name: self._weights.get(name, array) for name, array in named}
        outputs = dict(zip(step.outputs, recorded.results, strict=True))
        session = _session(self._model(step, operands, outputs))
        binding = session.io_binding()
        kept = {n: np.ascontiguousarray(a) for n, a in operands.items() if n not in self._weights}
        for name, array in kept.items():
            binding.bind_input(name, "cpu", 0, *_place(array))
        made = {n: np.zeros(a.shape, a.dtype) for n, a in outputs.items()}
        for name, array in made.items():
            binding.bind_output(name, "cpu", 0, *_place(array))
        session.run_with_iobinding(binding)
        return tuple(made.values())

    def _model(
        self, step: Step, operands: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]]
    ) -> onnx.ModelProto:
        """One node; its weights are constants, as in the engine, because kernels differ by it."""
        node = self._nodes[step.name]
        fixed = [_tensor(n, a) for n, a in operands.items() if n in self._weights]
        given = [_value(n, a) for n, a in operands.items() if n not in self._weights]
        wanted = [_value(n, a) for n, a in outputs.items()]
        graph = helper.make_graph([node], step.name, given, wanted, fixed)
        used = [self._functions[node.op_type]] if node.op_type in self._functions else []
        return helper.make_model(
            graph, functions=used, opset_imports=self._opsets, ir_version=self._ir_version
        )


def judge(
    recorded: Recorded, results: tuple[NDArray[Any], ...], masks: Masks, thresholds: Thresholds
) -> Iterator[Verdict]:
    """A verdict on each output of a node."""
    for name, body, truth in zip(recorded.step.outputs, results, recorded.results, strict=True):
        a, b = _defined(name, body, masks), _defined(name, truth, masks)
        yield _judge_one(name, a, b, thresholds)


def _judge_one(name: str, a: NDArray[Any], b: NDArray[Any], limits: Thresholds) -> Verdict:
    if a.dtype.kind in "iu":
        return _codes(name, a, b)
    exact = a.dtype.itemsize > 1
    a, b = a.astype(np.float64), b.astype(np.float64)
    unread = np.isnan(a) & np.isnan(b)
    if not np.isfinite(a[~unread]).all():
        return Verdict(name, False, "NaN or infinity where the reference has none", hard=True)
    d = distance(np.where(unread, 0, a), np.where(unread, 0, b))
    most = limits.rel_l2 if exact else 0.1
    reason = "" if d.rel_l2 <= most else f"relative L2 {d.rel_l2:.2g} > {most:g}"
    figures = {"rel_l2": d.rel_l2, "max_abs": d.max_abs}
    return Verdict(name, not reason, reason, figures, hard=bool(reason))


def _codes(name: str, a: NDArray[Any], b: NDArray[Any]) -> Verdict:
    part = float(np.mean(a != b)) if a.size else 0.0
    most = MOST_OTHER_CODES if a.dtype == np.uint8 else 0.0
    reason = "" if part <= most else f"{part:.2%} of the values differ"
    return Verdict(name, not reason, reason, {"differ": part}, hard=bool(reason))


def _defined(name: str, array: NDArray[Any], masks: Masks) -> NDArray[Any]:
    """The part of an output that has a value: valid tokens, live rows, all but the scratch row."""
    if name in masks.states:
        return array[:-1]
    if name in EMITTED:
        return array[masks.emitting]
    if array.ndim and array.shape[0] == len(masks.tokens):
        return array[masks.tokens]
    if array.ndim and array.shape[0] == len(masks.rows):
        return array[masks.rows]
    return array


def _session(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.log_severity_level = 3
    return ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


def _place(array: NDArray[Any]) -> tuple[int, tuple[int, ...], int]:
    return DType.of(array.dtype).onnx, array.shape, array.ctypes.data


def _value(name: str, array: NDArray[Any]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, DType.of(array.dtype).onnx, array.shape)


def _tensor(name: str, array: NDArray[Any]) -> onnx.TensorProto:
    raw = np.ascontiguousarray(array).tobytes()
    return helper.make_tensor(name, DType.of(array.dtype).onnx, array.shape, raw, raw=True)
