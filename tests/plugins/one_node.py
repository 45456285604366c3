"""Wraps ops in the smallest ONNX model that holds them and runs it on onnxruntime.

Knows onnx and onnxruntime and no op. The model is made as the builder makes it: nodes in
domain `spark`, each with its function body attached, weights as initializers, the session at
ORT_ENABLE_BASIC.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
from numpy.typing import NDArray

from spark_engine.op import DOMAIN, Attrs, Op
from spark_engine.plugins.common.onnx_nodes import OPSET
from spark_engine.tensors import Array, DType, TensorSpec
from tests.plugins.cases.seeded import seeded


@dataclass(frozen=True)
class Node:
    """One node of a test graph: an op of ours, or a standard op by name."""

    op: Op | str
    inputs: Sequence[str]
    outputs: Sequence[str]
    attrs: Attrs = field(default_factory=dict)


def spec_of(name: str, array: Array) -> TensorSpec:
    return TensorSpec(name, DType.of(array.dtype), array.shape)


def formal_names(names: Sequence[str], count: int) -> list[str]:
    """The names of `count` results, a last `x*` numbered x0, x1, …"""
    fixed = [n for n in names if not n.endswith("*")]
    if len(fixed) == len(names):
        return fixed[:count]
    return fixed + [f"{names[-1][:-1]}{i}" for i in range(count - len(fixed))]


def result_names(op: Op, attrs: Attrs, count: int) -> list[str]:
    """The formal names of a node's `count` results."""
    return formal_names([r.name for r in op.made(attrs)], count)


def constants(op: Op, attrs: Attrs) -> list[str]:
    """The operands that are weights in every engine; all others are written again each step."""
    return [o.name for o in op.given(attrs) if o.constant]


def row_wise(op: Op) -> bool:
    """Whether every token is on its own: nothing is of a sequence, an image, a slot or a page, nor
    of the tokens before in its row of `tile`."""
    alone = all(o.unit in (None, "token") and o.name != "live" for o in op.operands)
    alone = alone and not any("tile" in case.attrs for case in seeded(op))
    return alone and op.results[0].dims[:1] != ("grouped",)


def run_op(
    op: Op, attrs: Attrs, arrays: Sequence[Array], constant: Sequence[str] | None = None
) -> tuple[Array, ...]:
    """The op's outputs by its body. `constant` names the operands made initializers."""
    names = op.names(attrs, len(arrays))
    specs = tuple(spec_of(n, a) for n, a in zip(names, arrays, strict=True))
    outs = op.infer(attrs, specs)
    out_names = [f"out_{n}" for n in result_names(op, attrs, len(outs))]
    fixed = constants(op, attrs) if constant is None else constant
    values = dict(zip(names, arrays, strict=True))
    results = run_graph(
        [Node(op, names, out_names, attrs)], values, out_names, [n for n in names if n in fixed]
    )
    return tuple(results[n] for n in out_names)


def run_graph(
    nodes: Sequence[Node],
    values: Mapping[str, Array],
    outputs: Sequence[str],
    constant: Sequence[str] = (),
    threads: int = 1,
) -> dict[str, Array]:
    """Runs the nodes over `values`; `constant` names those that become initializers."""
    session, specs = _kept(_Asked(nodes, values, outputs, constant, threads))
    feeds = {k: v for k, v in values.items() if k not in constant}
    return execute(session, feeds, [specs[n] for n in outputs])


class _Asked:
    """What `build` is asked for; equal where nodes, specs and weights are."""

    def __init__(
        self,
        nodes: Sequence[Node],
        values: Mapping[str, Array],
        outputs: Sequence[str],
        constant: Sequence[str],
        threads: int,
    ) -> None:
        self.given = nodes, values, outputs, constant, threads
        # An op by its identity, which is no other's while this holds it.
        said = [
            (n.op if isinstance(n.op, str) else id(n.op), *n.inputs, 0, *n.outputs, repr(n.attrs))
            for n in nodes
        ]
        specs = [(name, a.dtype.name, a.shape) for name, a in values.items()]
        weights = [np.ascontiguousarray(values[name]).tobytes() for name in constant]
        self._key = repr((said, specs, *outputs, 0, *constant, threads)), *weights

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Asked) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


@functools.lru_cache(maxsize=8)
def _kept(asked: _Asked) -> tuple[ort.InferenceSession, dict[str, TensorSpec]]:
    """A session serves many calls, as in an engine: tokens of a round or rows of a launch, one by
    one."""
    return build(*asked.given)


def build(
    nodes: Sequence[Node],
    values: Mapping[str, Array],
    outputs: Sequence[str],
    constant: Sequence[str] = (),
    threads: int = 1,
    dump: Path | None = None,
) -> tuple[ort.InferenceSession, dict[str, TensorSpec]]:
    """A session over the nodes and the specs of every value; `dump` gets the optimised model."""
    specs = {name: spec_of(name, array) for name, array in values.items()}
    protos, functions = [], []
    for i, node in enumerate(nodes):
        proto, function = _proto(node, specs, f"n{i}")
        protos.append(proto)
        functions += [function] if function else []
    graph = onnx.helper.make_graph(
        protos,
        "one_node",
        [_value(specs[n]) for n in values if n not in constant],
        [_value(specs[n]) for n in outputs],
        [_tensor(n, values[n]) for n in constant],
    )
    opsets = [onnx.helper.make_opsetid("", OPSET), onnx.helper.make_opsetid(DOMAIN, 1)]
    model = onnx.helper.make_model(graph, functions=functions, opset_imports=opsets, ir_version=10)
    return _session(model, threads, dump), specs


def _proto(
    node: Node, specs: dict[str, TensorSpec], overload: str
) -> tuple[onnx.NodeProto, onnx.FunctionProto | None]:
    operands = tuple(specs[n] for n in node.inputs)
    if isinstance(node.op, str):
        specs.update({n: _standard(node, operands, n) for n in node.outputs})
        proto = onnx.helper.make_node(node.op, node.inputs, node.outputs, **node.attrs)
        return proto, None
    for name, spec in zip(node.outputs, node.op.infer(node.attrs, operands), strict=True):
        specs[name] = TensorSpec(name, spec.dtype, spec.shape)
    function = onnx.parser.parse_function(node.op.body(node.attrs, operands))
    function.overload = overload
    proto = onnx.helper.make_node(
        node.op.name, node.inputs, node.outputs, domain=DOMAIN, overload=overload
    )
    return proto, function


def _standard(node: Node, operands: Sequence[TensorSpec], name: str) -> TensorSpec:
    """The output spec of the two standard ops that tests use: Add and Concat on the last axis."""
    first = operands[0]
    if node.op == "Add":
        return TensorSpec(name, first.dtype, first.shape)
    assert node.op == "Concat", f"no shape rule for the standard op {node.op}"
    width = sum(s.dims[-1] for s in operands)
    return TensorSpec(name, first.dtype, (*first.shape[:-1], width))


def _value(spec: TensorSpec) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(spec.name, spec.dtype.onnx, spec.dims)


def _tensor(name: str, array: Array) -> onnx.TensorProto:
    raw = np.ascontiguousarray(array).tobytes()
    return onnx.helper.make_tensor(name, DType.of(array.dtype).onnx, array.shape, raw, raw=True)


def _session(model: onnx.ModelProto, threads: int, dump: Path | None) -> ort.InferenceSession:
    options = ort.SessionOptions()
    if dump is not None:
        options.optimized_model_filepath = str(dump)
    options.intra_op_num_threads = threads
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def execute(
    session: ort.InferenceSession, feeds: Mapping[str, Array], outputs: Sequence[TensorSpec]
) -> dict[str, Array]:
    """Runs over bound buffers; every output buffer holds poison before the run."""
    binding = session.io_binding()
    kept = [np.ascontiguousarray(a) for a in feeds.values()]
    for name, array in zip(feeds, kept, strict=True):
        binding.bind_input(name, "cpu", 0, _element(array), array.shape, array.ctypes.data)
    results = {spec.name: poison(spec) for spec in outputs}
    for name, array in results.items():
        binding.bind_output(name, "cpu", 0, _element(array), array.shape, array.ctypes.data)
    session.run_with_iobinding(binding)
    return results


def _element(array: Array) -> int:
    return DType.of(array.dtype).onnx


def poison(spec: TensorSpec) -> Array:
    """A buffer full of NaN (floats) or of a wild value (integers)."""
    array = np.empty(spec.dims, spec.dtype.numpy)
    if spec.dtype in (DType.F32, DType.F16, DType.BF16, DType.F8E4M3):
        array[...] = np.asarray(np.nan).astype(array.dtype)
    else:
        array.view(np.uint8)[...] = 0x01 if spec.dtype is DType.BOOL else 0x7B
    return array


def widen(array: Array) -> NDArray[Any]:
    """Floats of any width as float64, anything else unchanged."""
    small = (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float16, np.float32)
    return array.astype(np.float64) if array.dtype in [np.dtype(d) for d in small] else array
