"""An executor that computes with the ops' float64 references: independent of onnxruntime.

Reads the model that the `ort` executor would run, and calls `Op.reference` in place of each
function. Between nodes values have the graph's dtypes, as in every executor. It is slow and written
to be read.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from spark_engine.check.engines.live_rows import LiveRows
from spark_engine.engine_file import EngineHeader, read_manifest
from spark_engine.errors import EngineError, ExecutorError
from spark_engine.interface import STATE_OUT
from spark_engine.manifest import weights_name
from spark_engine.op import DOMAIN, Attrs, Op
from spark_engine.plugins.registry import get
from spark_engine.runtime.executors.executor import Specs, SynchronousExecutor
from spark_engine.runtime.ranks.communicator import LinkCommunicator
from spark_engine.segments import Collective, Segment, Segments
from spark_engine.tensors import TensorSpec
from spark_engine.weights_file import map_weights

POISON = 0xFF  # bytes: NaN in every float format, -1 in every integer
ORIGIN = "spark"  # builder/executors/ort.py writes it
Values = dict[str, NDArray[Any]]
Arrays = tuple[NDArray[Any], ...]
Watch = Callable[["ReferenceStep", Arrays, Arrays, LiveRows], None]
NEAR = 1  # a watched launch also shows this many neighbours of its rows and pages


@dataclass(frozen=True)
class ReferenceStep:
    """One node: an op of the domain `spark` with its attributes, or a standard operator (`op` is
    None)."""

    name: str
    kind: str
    op: Op | None
    attrs: Attrs
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def read_steps(payload: bytes) -> list[ReferenceStep]:
    """The nodes of an `ort` payload in order.

    Raises EngineError if a node lacks its op as metadata.
    """
    model = onnx.load_from_string(payload)
    return [_step(node) for node in model.graph.node]


def graphs_of(payload: bytes, ranks: int) -> list[bytes]:
    """The ONNX models of an `ort` payload in order: one, or those between collectives."""
    if ranks == 1:
        return [payload]
    return [step.model for step in Segments.decode(payload).steps if isinstance(step, Segment)]


class ReferenceExecutor(SynchronousExecutor):
    """An executor (runtime/executors/executor.py). `watch`, if set, is called with every node.

    With `comm` it is one of several ranks, each of which has its own weights.

    A launch is computed over the rows that it uses only (`live_rows`), also for `watch`.
    """

    def __init__(
        self,
        header: EngineHeader,
        payload: bytes,
        folder: Path,
        threads: int = 0,
        comm: LinkCommunicator | None = None,
    ) -> None:
        self.specs = Specs(header.inputs, header.states, header.outputs)
        self._comm = comm
        self._steps: list[ReferenceStep | Collective] = (
            [*read_steps(payload)] if comm is None else []
        )
        for step in () if comm is None else Segments.decode(payload).steps:
            self._steps += read_steps(step.model) if isinstance(step, Segment) else [step]
        rank, ranks = (0, 1) if comm is None else (comm.rank, comm.ranks)
        self._weights = map_weights(folder / weights_name(rank, ranks))
        manifest = read_manifest(folder)
        self._limits, self._states = manifest.limits, manifest.states
        self.watch: Watch | None = None

    def run(self, buffers: Mapping[str, NDArray[Any]]) -> None:
        """One launch. Raises ExecutorError when a reference returns another shape than planned."""
        live = LiveRows.of(buffers, self._limits, self._states, NEAR if self.watch else 0)
        values: Values = {**self._weights}
        for spec in (*self.specs.inputs, *self.specs.states):
            values[spec.name] = live.cut(spec.name, buffers[spec.name].view())
            values[spec.name].flags.writeable = False
        for step in self._steps:
            if isinstance(step, Collective):
                self._combine(step, values)
                continue
            operands = tuple(values[name] for name in step.inputs)
            results = _compute(step, operands)
            values.update(zip(step.outputs, results, strict=True))
            if self.watch is not None:
                self.watch(step, operands, results, live)
        for spec in self.specs.outputs:
            live.put_output(buffers[spec.name], _checked(values[spec.name], spec))
        for spec in self.specs.states:
            if (value := values.get(spec.name + STATE_OUT)) is not None:  # it may be read-only
                live.put(spec.name, buffers[spec.name], value)

    def close(self) -> None:
        """Does nothing: weights are mapped."""

    def _combine(self, step: Collective, values: Values) -> None:
        """The collective's result: the ranks' sum, or their parts concatenated, of all rows or of
        those that the step's `rows` name. Other rows are undefined."""
        assert self._comm is not None
        given, rows = values[step.input], asdict(step).get("rows")
        if step.op == "all_reduce":
            (values[step.output],) = get(step.op).reference({}, tuple(self._comm.parts(given)))
            return
        some = values[rows] != 0 if rows else np.ones(len(given), np.bool_)
        width = given.shape[-1] * self._comm.ranks
        values[step.output] = np.empty((*given.shape[:-1], width), given.dtype)
        values[step.output].view(np.uint8).fill(POISON)
        values[step.output][some] = np.concatenate(self._comm.parts(given[some]), axis=-1)


def _step(node: onnx.NodeProto) -> ReferenceStep:
    names = tuple(node.input), tuple(node.output)
    if node.domain != DOMAIN:
        given = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        return ReferenceStep(node.name, node.op_type, None, given, *names)
    origin = {p.key: p.value for p in node.metadata_props}.get(ORIGIN)
    if origin is None:
        raise EngineError(
            f"node {node.name} does not name its op: rebuild the engine with spark-build"
        )
    row = json.loads(origin)
    return ReferenceStep(node.name, row["op"], get(row["op"]), row["attrs"], *names)


def _compute(step: ReferenceStep, operands: tuple[NDArray[Any], ...]) -> tuple[NDArray[Any], ...]:
    if step.op is not None:
        return tuple(step.op.reference(step.attrs, operands))
    if step.kind == "Add":
        wide = operands[0].astype(np.float64) + operands[1].astype(np.float64)
        return (wide.astype(operands[0].dtype),)
    if step.kind == "Concat":
        return (np.concatenate(operands, axis=int(step.attrs["axis"])),)
    raise ExecutorError(f"node {step.name} is a {step.kind}, for which there is no reference")


def _checked(value: NDArray[Any], spec: TensorSpec) -> NDArray[Any]:
    if value.shape[1:] != spec.dims[1:]:
        raise ExecutorError(f"{spec.name} came out as {value.shape}, planned {spec.dims}")
    return value.astype(spec.dtype.numpy, copy=False)
