"""Build half of the `trt` executor: a bucket becomes an engine of TensorRT-RTX, and an ONNX model.

Knows ONNX and TensorRT. TensorRT compiles the network: the bucket's plain-ONNX form, op bodies
inlined, for every GPU architecture of `CAPABILITIES` at once and without a GPU. Nodes of `HOST`
stay out of it, since its ScatterND takes no reduction, or since they write states that the host
has: onnxruntime runs them afterwards, on the logits or the tower's rows. Casts to and from FP8
become QuantizeLinear and DequantizeLinear of scale 1, the only ops of
TensorRT that make or read FP8; the bodies clip first, so the codes are the same.

An engine contains its weights, with 4-bit codes as i32. This executor is a second compiler of the
same network to compare with (`spark-check --against`); it is not meant to serve a large model.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import onnx
import onnx_graphsurgeon as gs
from onnx import TensorProto, helper, inliner

from spark_engine.builder.executors.backend import Emitted
from spark_engine.builder.executors.header import header
from spark_engine.builder.executors.ort import OrtBackend, encode, predicted_seconds
from spark_engine.builder.graph.family import FamilyGraph
from spark_engine.builder.graph.nodes import Ops
from spark_engine.builder.plan.buckets import Size
from spark_engine.builder.plan.options import CAPABILITIES, BuildPlan
from spark_engine.device.trt_library import library, logger, out_of_memory, says
from spark_engine.device.trt_payload import TrtPayload
from spark_engine.errors import CapacityError, GraphError, OptionError
from spark_engine.tensors import DType
from spark_engine.weights_file import WeightEntry

HOST = ("mark_tokens", "sample", "store_rows")
FP8 = TensorProto.FLOAT8E4M3FN
ONE, ZERO = "fp8.one", "fp8.zero"  # scale and zero point of casts
MODEL = "bucket.onnx"


class TrtBackend(OrtBackend):
    """Backend of TensorRT-RTX. Raises OptionError for what its parser does not support."""

    executor = "trt"

    def __init__(self, plan: BuildPlan, ops: Ops, cubins: Path) -> None:
        super().__init__(plan, ops, cubins)
        self._trt = library("this target", OptionError)
        self._ops = ops
        if plan.precision.kv is DType.F8E4M3:
            raise OptionError(
                f"--kv-dtype fp8: --target {plan.target} reads no FP8 pages; give --kv-dtype bf16 "
                "or f32"
            )
        if plan.limits.drafts:
            raise OptionError(
                f"--drafts {plan.limits.drafts}: --target {plan.target} samples on the host after "
                "the network, and a round samples within it; give --drafts 0"
            )

    def emit(self, graph: FamilyGraph, size: Size, weights: Mapping[str, WeightEntry]) -> Emitted:
        """An engine and the model that runs after it, as a `TrtPayload`.

        `arena_bytes`: the engine's memory while it runs, as TensorRT reports it. `buffer_bytes`:
        the engine, and a second copy of each updated state.
        """
        network, tail = split(graph.graph)
        core = plain(encode(network, size.dims, weights, self._ops))
        engine = compile_engine(self._trt, core, self.weights, f"{size.family} {size.rows}")
        behind = encode(tail, size.dims, weights, self._ops)
        made = header(graph, size, self.executor, self._target)
        names = [t.name for t in network.outputs]
        payload = TrtPayload(engine, behind, tuple(names), self._trt.__version__).encode()
        again = sum(spec.nbytes for spec in made.states if spec.name + ".out" in names)
        memory = {"arena_bytes": again, "buffer_bytes": 2 * len(engine)}
        return Emitted(made, payload, memory, predicted_seconds(graph, size, behind))


BACKEND = TrtBackend


def split(graph: gs.Graph) -> tuple[gs.Graph, gs.Graph]:
    """(the network, the nodes that run after it on the host), each with its inputs and outputs; the
    network's outputs include what the second part reads of it."""
    host = [node for node in graph.nodes if node.op in HOST]
    network = [node for node in graph.nodes if node.op not in HOST]
    made = {id(t) for node in network for t in node.outputs}
    passed = [t for node in host for t in node.inputs if id(t) in made]
    shown = {id(t) for t in graph.outputs}
    more = [t for t in {id(t): t for t in passed}.values() if id(t) not in shown]
    return _part(graph, network, more, []), _part(graph, host, [], [*passed])


def _part(
    graph: gs.Graph, nodes: list[gs.Node], more: list[gs.Variable], given: list[gs.Variable]
) -> gs.Graph:
    read = {id(t) for node in nodes for t in node.inputs}
    made = {id(t) for node in nodes for t in node.outputs}
    inputs = [t for t in graph.inputs if id(t) in read]
    inputs += {id(t): t for t in given}.values()
    outputs = [t for t in graph.outputs if id(t) in made] + more
    return gs.Graph(nodes=nodes, inputs=inputs, outputs=outputs, opset=graph.opset)


def plain(model: bytes) -> onnx.ModelProto:
    """The model with local functions inlined, and with FP8 as TensorRT reads it."""
    inlined = inliner.inline_local_functions(onnx.ModelProto.FromString(model))
    shapes = onnx.shape_inference.infer_shapes(inlined).graph
    types = {v.name: v.type.tensor_type.elem_type for v in (*shapes.value_info, *shapes.input)}
    types |= {w.name: w.data_type for w in shapes.initializer}
    _fp8_casts(inlined.graph, types)
    inlined.graph.initializer.extend(
        (
            helper.make_tensor(ONE, TensorProto.FLOAT, [], [1.0]),
            TensorProto(name=ZERO, data_type=FP8, raw_data=b"\0"),
        )
    )
    return inlined


def _fp8_casts(graph: onnx.GraphProto, types: Mapping[str, int]) -> None:
    """Casts to and from FP8, also in bodies of loops."""
    nodes = []
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _fp8_casts(attribute.g, types)
        nodes += _fp8_cast(node, types) if node.op_type == "Cast" else [node]
    del graph.node[:]
    graph.node.extend(nodes)


def _fp8_cast(node: onnx.NodeProto, types: Mapping[str, int]) -> list[onnx.NodeProto]:
    """The nodes that replace a cast: through f32 if the other side has another type."""
    (source,), (made,), to = node.input, node.output, node.attribute[0].i
    if to == FP8 and types.get(source) != FP8:
        wide = f"{made}.f32"
        cast = helper.make_node("Cast", [source], [wide], to=TensorProto.FLOAT)
        return [cast, helper.make_node("QuantizeLinear", [wide, ONE, ZERO], [made])]
    if types.get(source) == FP8 and to != FP8:
        wide = f"{made}.f32"
        read = helper.make_node("DequantizeLinear", [source, ONE, ZERO], [wide])
        return [read, helper.make_node("Cast", [wide], [made], to=to)]
    return [node]


def compile_engine(trt: ModuleType, model: onnx.ModelProto, weights: Path, label: str) -> bytes:
    """The engine of a model with its weights as external data in the file `weights`.

    Raises GraphError with TensorRT's message if it refuses the model, and CapacityError if memory
    does not suffice.
    """
    errors: list[str] = []
    log = logger(trt, errors)
    builder = trt.Builder(log)
    network = builder.create_network()
    parser = trt.OnnxParser(network, log)
    with tempfile.TemporaryDirectory(prefix="spark-trt-") as name:
        folder = Path(name)
        (folder / weights.name).symlink_to(weights.resolve())
        (folder / MODEL).write_bytes(model.SerializeToString())
        if not parser.parse_from_file(str(folder / MODEL)):
            found = [parser.get_error(i) for i in range(parser.num_errors)]
            words = "; ".join(f"{e.node_operator()}: {e.desc()}" for e in found)
            _refuse_memory(label, [*errors, words])
            raise GraphError(f"TensorRT does not read the {label} bucket: {words}")
        config = builder.create_builder_config()
        config.clear_flag(trt.BuilderFlag.TF32)  # no TF32: this executor is compared with others
        config.num_compute_capabilities = len(CAPABILITIES)
        for i, capability in enumerate(CAPABILITIES):
            config.set_compute_capability(getattr(trt.ComputeCapability, capability), i)
        made = builder.build_serialized_network(network, config)
    if made is None:
        _refuse_memory(label, errors)
        raise GraphError(f"TensorRT does not build the {label} bucket{says(errors)}")
    return bytes(made)


def _refuse_memory(label: str, errors: Sequence[str]) -> None:
    if out_of_memory(errors):
        raise CapacityError(
            f"TensorRT lacks memory to build the {label} bucket: it holds the weights "
            f"several times: stop other programs, or build fewer and smaller buckets (--decode, "
            f"--prefill, --max-context){says(errors)}"
        )
