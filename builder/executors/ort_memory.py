"""Bytes that a session of onnxruntime takes: while it is opened, open, and while it runs.

Knows how onnxruntime folds, packs and orders nodes, and ONNX; knows no op.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

import onnx
from onnx import helper, inliner

from spark_engine.builder.graph.family import FamilyGraph
from spark_engine.tensors import DType, TensorSpec

# When a session is opened, it evaluates the nodes that depend on weights alone and keeps the
# results: every matrix as f32, packed. The tower's does not, and holds none. f32 bytes per stored
# byte:
AS_F32 = {DType.U8: 8, DType.F8E4M3: 4, DType.BF16: 2, DType.F16: 2, DType.F32: 1}  # U8: 2 nibbles
NODES = 64  # bytes of a session's nodes and kernels per byte of the model, measured
# Meanwhile it takes additional memory, as a multiple of a matrix's f32 bytes: for a matrix that is
# only cast (0.1 to 0.3 measured), and for one with a scale per block, which is expanded first
# (2.4 to 3.7, most for stacked experts).
CAST, BLOCKS = 0.5, 4
WORK = 1.5  # an arena's bytes per byte that lives in it: loops' values, and what chunks leave over
CHUNK = 2 << 20  # an arena's first


def held_bytes(weights: Sequence[TensorSpec], payload: bytes) -> int:
    """Bytes that an open session of this model holds, without the weights file."""
    return sum(map(f32_bytes, weights)) + NODES * len(payload)


def f32_bytes(spec: TensorSpec) -> int:
    """Bytes of a weight as f32."""
    return AS_F32.get(spec.dtype, 0) * spec.nbytes


def passing_bytes(graph: FamilyGraph) -> int:
    """Bytes that opening a session takes temporarily, in addition to what it then holds."""
    found: dict[str, float] = {}
    for node in graph.graph.nodes:
        specs = [graph.weights[t.name].spec for t in node.inputs if t.name in graph.weights]
        scales = {len(spec.shape) for spec in specs if spec.dtype is DType.F32}
        for spec in specs:
            by_block = spec.dtype is DType.F8E4M3 and len(spec.shape) in scales
            times = BLOCKS if by_block or spec.dtype is DType.U8 else CAST
            found[spec.name] = times * f32_bytes(spec)
    return int(sum(found.values()))


def work_bytes(payload: bytes, dims: Mapping[str, int], updates: Collection[str]) -> int:
    """Bytes of a session's arena for a launch with these dimensions.

    `updates`: the outputs that are states. onnxruntime computes them last, so that everything they
    need lives until then: all layers' states of the launch's rows.
    """
    model = onnx.ModelProto.FromString(payload)
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_value = dims[dim.dim_param]
    graph = onnx.shape_inference.infer_shapes(inliner.inline_local_functions(model)).graph
    sizes = {value.name: _nbytes(value.type.tensor_type) for value in graph.value_info}
    order = _order(graph, {v.name for v in graph.output} - {*updates}, sizes)
    last = {name: at for at, node in enumerate(order) for name in (*_reads(node), *node.output)}
    live = most = 0
    for at, node in enumerate(order):
        live += sum(sizes.get(name, 0) for name in node.output)
        most = max(most, live)
        done = (name for name in {*_reads(node), *node.output} if last[name] == at)
        live -= sum(sizes.get(name, 0) for name in done)
    return int(WORK * most) + CHUNK


def _order(graph: onnx.GraphProto, wanted: set[str], sizes: dict[str, int]) -> list[onnx.NodeProto]:
    """The nodes of a launch: those that `wanted` outputs need, then the others. Removes the sizes
    of constants, which no launch computes."""
    constants = {weight.name for weight in graph.initializer}
    run = []
    for node in graph.node:
        if constants.issuperset(_reads(node)):
            constants.update(node.output)
        else:
            run.append(node)
    for name in constants & sizes.keys():
        del sizes[name]
    early: list[onnx.NodeProto] = []
    late: list[onnx.NodeProto] = []
    for node in reversed(run):
        needed = not wanted.isdisjoint(node.output)
        wanted |= {*_reads(node)} if needed else set()
        (early if needed else late).append(node)
    return [*reversed(early), *reversed(late)]


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    """The names that a node reads, those of its nested graphs too."""
    yield from node.input
    for attribute in node.attribute:
        for inner in attribute.g.node:
            yield from _reads(inner)


def _nbytes(tensor: onnx.TypeProto.Tensor) -> int:
    """0 where a dimension is not known."""
    total: int = helper.tensor_dtype_to_np_dtype(tensor.elem_type).itemsize
    for dim in tensor.shape.dim:
        total *= dim.dim_value
    return total
