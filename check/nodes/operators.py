"""Runs every node of an engine alone: the executor's body against the op's float64 reference.

Operands are recorded while the reference executor runs a launch: they are realistic, and an error
of one node does not affect the next. Knows onnxruntime.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import helper

from spark_engine.check.engines.reference import POISON, ReferenceStep
from spark_engine.check.nodes.compare_node import Recorded, StateValue
from spark_engine.errors import OptionError
from spark_engine.tensors import DType


class NodeBodies:
    """Runs single nodes of one payload on onnxruntime; `graphs` are its models.

    `unread`: arrays of states that texts do not read, for nodes that were recorded without them.
    """

    def __init__(
        self,
        graphs: Sequence[bytes],
        weights: Mapping[str, NDArray[Any]],
        unread: Mapping[str, NDArray[Any]],
    ) -> None:
        models = [onnx.load_from_string(graph) for graph in graphs]
        self._nodes = {node.name: node for model in models for node in model.graph.node}
        self._functions = {f.name: f for model in models for f in model.functions}
        self._opsets = list(models[0].opset_import)
        self._ir_version = models[0].ir_version
        self._weights = weights
        self._unread = unread

    def run(self, recorded: Recorded) -> tuple[NDArray[Any], ...]:
        """The node's outputs for the recorded operands and the payload's weights.

        Raises OptionError if the payload has no such node.
        """
        step = recorded.step
        if step.name not in self._nodes:
            raise OptionError(
                f"the engine has no node {step.name}: it was built by another version, so its "
                "nodes cannot be checked one by one; use --level layer"
            )
        named = zip(step.inputs, recorded.operands, strict=True)
        operands = {name: self._weights.get(name, array) for name, array in named}
        wanted = self._nodes[step.name].input
        operands |= {name: array for name, array in self._unread.items() if name in wanted}
        outputs = dict(zip(step.outputs, recorded.results, strict=True))
        for tensors in (operands, outputs):
            for name in tensors.keys() & recorded.states.keys():
                tensors[name] = _whole(tensors[name], recorded.states[name])
        session = _session(self._model(step, operands, outputs))
        binding = session.io_binding()
        kept = {n: np.ascontiguousarray(a) for n, a in operands.items() if n not in self._weights}
        for name, array in kept.items():
            binding.bind_input(name, "cpu", 0, *_place(array))
        made = {n: np.zeros(a.shape, a.dtype) for n, a in outputs.items()}
        for name, array in made.items():
            binding.bind_output(name, "cpu", 0, *_place(array))
        session.run_with_iobinding(binding)
        for name in made.keys() & recorded.states.keys():
            made[name] = made[name][recorded.states[name].index]
        return tuple(made.values())

    def _model(
        self,
        step: ReferenceStep,
        operands: Mapping[str, NDArray[Any]],
        outputs: Mapping[str, NDArray[Any]],
    ) -> onnx.ModelProto:
        """A session of one node; its weights are constants, as in the engine, since that selects
        other kernels."""
        node = self._nodes[step.name]
        fixed = [_tensor(n, a) for n, a in operands.items() if n in self._weights]
        given = [_value(n, a) for n, a in operands.items() if n not in self._weights]
        wanted = [_value(n, a) for n, a in outputs.items()]
        graph = helper.make_graph([node], step.name, given, wanted, fixed)
        used = [self._functions[node.op_type]] if node.op_type in self._functions else []
        return helper.make_model(
            graph, functions=used, opset_imports=self._opsets, ir_version=self._ir_version
        )


def _whole(array: NDArray[Any], held: StateValue) -> NDArray[Any]:
    """All units of a state, with NaN in units that were not recorded."""
    whole = np.empty((held.count, *array.shape[1:]), array.dtype)
    whole.view(np.uint8).fill(POISON)
    whole[held.index] = array
    return whole


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
