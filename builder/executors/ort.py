"""Build half of the `ort` executor: a graph and a bucket become an ONNX model, as bytes.

Knows ONNX. Each node of the domain `spark` becomes a call of a model-local function with the op's
body, so that onnxruntime needs no custom library. Weights are external data in
`weights.safetensors`, found by offset, so the bytes stay small and no weight is copied: the reader
sets the session entry `session.model_external_initializers_file_folder_path` to the engine folder.
"""

import hashlib
import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import onnx
import onnx_graphsurgeon as gs
from onnx import helper, parser

from spark_engine.builder.executors.backend import Backend, Emitted
from spark_engine.builder.executors.header import header
from spark_engine.builder.executors.ort_memory import (
    NODES,
    f32_bytes,
    held_bytes,
    passing_bytes,
    work_bytes,
)
from spark_engine.builder.executors.shared_sampling import divided
from spark_engine.builder.graph.family import FamilyGraph
from spark_engine.builder.graph.memory import owners
from spark_engine.builder.graph.nodes import Ops, attrs_of, is_op, spec_of
from spark_engine.builder.plan.buckets import Size
from spark_engine.builder.plan.options import BuildPlan
from spark_engine.engine_file import WEIGHTS, EngineHeader
from spark_engine.errors import GraphError
from spark_engine.interface import STATE_OUT
from spark_engine.manifest import weights_name
from spark_engine.op import DOMAIN, Attrs
from spark_engine.segments import COLLECTIVES, Collective, Segment, Segments
from spark_engine.tensors import TensorSpec
from spark_engine.vision import VISION
from spark_engine.weights_file import WeightEntry

EXECUTOR = "ort"
OPSET = 23
# Cost model of a launch, for comparing buckets: a fixed time per operator in the bodies (the
# embedded model has 4,600 in a step and 8,700 in a round of three drafts: most of its time), and
# for each matrix the maximum of reading its f32 and of multiplying it with all rows. The tower's
# are cast in every launch; of its attention the products count.
CALL, READ, MULTIPLY = 4e-6, 20e9, 100e9  # seconds, bytes a second, operations a second
WIDEN = 1.7e9  # bytes of f32 a second
GATHERS = ("embed", "vision_patches")  # ops that read rows of their matrix
ORIGIN = "spark"  # metadata of a node: which op it calls, with which attributes


class OrtBackend(Backend):
    """Backend of the CPU. onnxruntime does not use the memory plan, and needs at most its bytes."""

    executor = EXECUTOR

    def __init__(self, plan: BuildPlan, ops: Ops, cubins: Path) -> None:
        self._target, self._ops, self._ranks = plan.target, ops, plan.ranks
        self._buckets = plan.buckets
        self._arenas: dict[bytes, int] = {}  # by model: its arena's bytes

    def emit(self, graph: FamilyGraph, size: Size, weights: Mapping[str, WeightEntry]) -> Emitted:
        """An ONNX model.

        `buffer_bytes`: an open session and its arena, at the first bucket of those that share it.
        `arena_bytes`: what opening it takes temporarily, beyond the states and arenas, which are
        not in memory yet.
        """
        inner = chained(graph, self._ops)
        tower = graph.family == VISION
        dims = size.dims if tower else {}
        payload = encode(graph.graph, dims, weights, self._ops, [*inner])
        made = header(graph, size, self.executor, self._target)
        made = replace(made, aliases={**made.aliases, **inner})
        memory = self._memory(graph, size, payload, made)
        seconds = predicted_seconds(graph, size, payload)
        if self._ranks > 1:
            payload = encode_segments(graph.graph, size, dims, weights, self._ops, [*inner])
        return Emitted(made, payload, memory, seconds)

    def _memory(
        self, graph: FamilyGraph, size: Size, payload: bytes, made: EngineHeader
    ) -> dict[str, int]:
        specs = [weight.spec for weight in graph.weights.values()]
        if graph.family == VISION:  # one matrix as f32 at a time, and what malloc retains of others
            passing = 2 * max(map(f32_bytes, specs), default=0)
            passing += work_bytes(payload, size.dims, made.aliases)
            return {"arena_bytes": passing, "buffer_bytes": held_bytes([], payload)}
        if payload in self._arenas:
            return {"arena_bytes": 0, "buffer_bytes": 0}
        largest = self._buckets.of(size.family)[-1]
        self._arenas[payload] = work_bytes(payload, largest.dims, made.aliases)
        untouched = sum(spec.nbytes for spec, _ in graph.states) + sum(self._arenas.values())
        passing = passing_bytes(graph) + NODES * len(payload) - untouched
        held = held_bytes(specs, payload) + self._arenas[payload]
        return {"arena_bytes": max(0, passing), "buffer_bytes": held}


BACKEND = OrtBackend


class Functions:
    """The model's local functions, one for each distinct body."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self._names: dict[Hashable, str] = {}
        self.protos: dict[str, onnx.FunctionProto] = {}

    def name(self, op: str, attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
        """The function that a node with these attributes and operands calls.

        A body depends on its operands' dtypes and shapes, not on their names, so equal layers share
        one: a body over hundreds of experts takes long to write.
        """
        key = (op, *sorted(attrs.items()), *((s.dtype, s.shape) for s in specs))
        if key not in self._names:
            text = self._ops[op].body(attrs, specs)
            name = f"{op}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
            if name not in self.protos:
                self.protos[name] = _function(name, text)
            self._names[key] = name
        return self._names[key]


def chained(graph: FamilyGraph, ops: Ops) -> dict[str, str]:
    """The state of each intermediate value between a state and its last update.

    They are outputs of the model too, so that the caller can bind them to the state's memory.
    Otherwise onnxruntime copies the whole state into memory that it allocates.
    """
    shared = owners(graph.graph, ops)
    written = ((t.name, shared[id(t)].name) for n in graph.graph.nodes for t in n.outputs)
    return {
        name: owner
        for name, owner in written
        if owner in graph.state_names and name != owner + STATE_OUT
    }


def encode(
    graph: gs.Graph,
    dims: dict[str, int],
    weights: Mapping[str, WeightEntry],
    ops: Ops,
    inner: Sequence[str] = (),
) -> bytes:
    """The graph's ONNX model (opset 23), serialised; equal inputs give equal bytes. Dimensions that
    are not in `dims` are free. The values named in `inner` are additional outputs, after the
    graph's.

    Raises GraphError when an op's body does not parse or the model is not valid ONNX.
    """
    made = {t.name: t for node in graph.nodes for t in node.outputs}
    shown = [*graph.outputs, *(made[name] for name in inner)]
    return _encoded(graph.nodes, graph.inputs, shown, dims, weights, ops, WEIGHTS)


def encode_segments(
    graph: gs.Graph,
    size: Size,
    dims: dict[str, int],
    weights: Mapping[str, WeightEntry],
    ops: Ops,
    inner: Sequence[str] = (),
) -> bytes:
    """The bucket's payload for ranks: the graph cut at its collectives; `dims` as for `encode`.

    A segment's outputs are the values that a later step reads, and those of the bucket's outputs
    and of `inner` that it computes. Raises GraphError as `encode` does.
    """
    known = {t.name for t in graph.inputs}
    shown = {t.name for t in graph.outputs} | {*inner}
    parts = _parts(divided(graph.nodes, ops))
    readers = [{t.name for node in part for t in node.inputs} for part in parts]
    steps: list[Segment | Collective] = []
    passed: dict[str, TensorSpec] = {}
    for i, part in enumerate(parts):
        made = {t.name: t for node in part for t in node.outputs}
        read = {t.name: t for node in part for t in node.inputs if t.name not in made}
        later = set().union(*readers[i + 1 :])
        kept = [t for t in made.values() if t.name in shown or t.name in later]
        specs = (spec_of(t).bind(size.dims) for t in kept)
        passed |= {s.name: s for s in specs if s.name not in shown}
        if is_op(part[0], *COLLECTIVES):
            given, *rows = (t.name for t in part[0].inputs)
            steps.append(Collective(part[0].op, given, part[0].outputs[0].name, *rows))
            continue
        used = [*read.values()]
        name = weights_name(0)
        model = _encoded(part, used, kept, dims, weights, ops, name)
        names = tuple(t.name for t in used if t.name not in weights)
        assert all(n in known or n in passed or n in shown for n in names)
        steps.append(Segment(model, names, tuple(t.name for t in kept)))
    return Segments(tuple(steps), tuple(passed.values())).encode()


def _parts(nodes: Iterable[gs.Node]) -> list[list[gs.Node]]:
    """The nodes between collectives, and each collective by itself, in order."""
    parts: list[list[gs.Node]] = []
    for node in nodes:
        alone = is_op(node, *COLLECTIVES)
        if alone or not parts or is_op(parts[-1][0], *COLLECTIVES):
            parts.append([])
        parts[-1].append(node)
    return parts


def _encoded(
    nodes: Sequence[gs.Node],
    inputs: Iterable[gs.Tensor],
    outputs: Iterable[gs.Tensor],
    dims: dict[str, int],
    weights: Mapping[str, WeightEntry],
    ops: Ops,
    file: str,
) -> bytes:
    """These nodes as an ONNX model with its weights in `file`."""
    functions = Functions(ops)
    calls = [_node(node, dims, ops, functions) for node in nodes]
    given, shown = ([_value(spec_of(t).bind(dims)) for t in ts] for ts in (inputs, outputs))
    body = helper.make_graph(calls, DOMAIN, given, shown)
    model = _model(body, functions.protos.values())
    _check(model)
    _attach_weights(model.graph, weights, file)
    return bytes(model.SerializeToString(deterministic=True))


def predicted_seconds(graph: FamilyGraph, size: Size, payload: bytes) -> float:
    """Estimated seconds of one launch. Assumes that all stacked experts are read."""
    model = onnx.ModelProto.FromString(payload)
    inside = {f.name: sum(n.op_type != "Constant" for n in f.node) for f in model.functions}
    total: float = CALL * sum(inside.get(node.op_type, 1) for node in model.graph.node)
    for node in graph.graph.nodes:
        result = spec_of(node.outputs[0]).bind(size.dims).dims
        rows = result[:1]
        if node.op == "vision_attention":
            total += 4 * result[0] ** 2 * result[1] / MULTIPLY
        for tensor in node.inputs:
            weight = graph.weights.get(tensor.name)
            if weight is not None and len(weight.spec.dims) > 1 and node.op not in GATHERS:
                held = f32_bytes(weight.spec)
                total += held / WIDEN if size.family == VISION else 0
                total += max(held / READ, 2 * (held / 4) * (rows[0] if rows else 1) / MULTIPLY)
    return total


def _node(node: gs.Node, dims: dict[str, int], ops: Ops, functions: Functions) -> onnx.NodeProto:
    inputs, outputs = [t.name for t in node.inputs], [t.name for t in node.outputs]
    if node.domain != DOMAIN:
        return helper.make_node(node.op, inputs, outputs, name=node.name, **node.attrs)
    op = ops[node.op]
    attrs, specs = attrs_of(node, op), tuple(spec_of(t).bind(dims) for t in node.inputs)
    name = functions.name(op.name, attrs, specs)
    call = helper.make_node(name, inputs, outputs, name=node.name, domain=DOMAIN)
    # Stores the op and its attributes as metadata, for spark-check: the body no longer has them.
    origin = {"op": op.name, "attrs": dict(attrs)}
    call.metadata_props.add(key=ORIGIN, value=json.dumps(origin, sort_keys=True))
    return call


def _function(name: str, text: str) -> onnx.FunctionProto:
    """The body as a function named `name`: one op may have several bodies in a graph."""
    try:
        function = parser.parse_function(text)
    except parser.ParseError as error:
        raise GraphError(f"the body of {name} does not parse: {error}\n{text}") from error
    function.name = name
    return function


def _model(graph: onnx.GraphProto, functions: Iterable[onnx.FunctionProto]) -> onnx.ModelProto:
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(
        graph,
        opset_imports=opsets,
        functions=list(functions),
        ir_version=helper.find_min_ir_version_for(opsets, ignore_unknown=True),
        producer_name="spark-engine",
    )


def _check(model: onnx.ModelProto) -> None:
    """Must run while weights are still inputs: otherwise the checker looks for their file."""
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError as error:
        raise GraphError(f"graph {model.graph.name} is not valid ONNX: {error}") from error


def _attach_weights(graph: onnx.GraphProto, weights: Mapping[str, WeightEntry], file: str) -> None:
    used = [value.name for value in graph.input if value.name in weights]
    kept = [value for value in graph.input if value.name not in weights]
    del graph.input[:]
    graph.input.extend(kept)
    graph.initializer.extend(_external(weights[name], file) for name in used)


def _external(entry: WeightEntry, file: str) -> onnx.TensorProto:
    spec = entry.spec
    tensor = onnx.TensorProto(
        name=spec.name,
        data_type=spec.dtype.onnx,
        dims=spec.dims,
        data_location=onnx.TensorProto.EXTERNAL,
    )
    place = {"location": file, "offset": str(entry.offset), "length": str(spec.nbytes)}
    for key, value in place.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def _value(spec: TensorSpec) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(spec.name, spec.dtype.onnx, spec.shape)
