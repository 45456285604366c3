"""The shared expert's sum: y = routed + sigmoid(x · wᵀ) · shared (transformers, Qwen3.5 MoE)."""

import numpy as np

from spark_engine.kernel import Plan
from spark_engine.op import Attrs, Op
from spark_engine.operand import Result
from spark_engine.plugins.common import fragments as fr
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.formats import format_fragments as ff
from spark_engine.plugins.kernels.common import row_quant as rq
from spark_engine.plugins.launch import Candidate, Kernel, Node, serve
from spark_engine.tensors import Array, DType, TensorSpec


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """(routed, shared, x, w) -> (y,)."""
    routed, shared, x, w = (a.astype(np.float64) for a in arrays)
    return ((routed + shared / (1 + np.exp(-(x @ w.T)))).astype(arrays[0].dtype),)


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """One column of a MatMul, sigmoid, multiply, add."""
    f = Text()
    weight = fr.sigmoid(f, ff.times(f, fr.widen(f, "x"), fr.widen(f, "w")))
    scaled = f("Mul", weight, fr.widen(f, "shared"))
    f.cast(f("Add", fr.widen(f, "routed"), scaled), OP.named(attrs, specs)["routed"].dtype, "y")
    return f.function("shared_gate", ("routed", "shared", "x", "w"), ("y",))


MOST_THREADS, MOST_VECTORS = 512, 4
KERNEL = Kernel("shared_gate", "routed shared x w y")


def _refuse(node: Node) -> str | None:
    k, w = node.dim("H"), node["w"]
    most = MOST_THREADS * MOST_VECTORS * rq.VECTOR
    if k > most:
        return f"a row of {k} does not fit the registers of a block; at most {most} do"
    if w.dtype not in (DType.BF16, DType.F32):
        return f"w is {w.dtype}; bf16 and f32 are read"
    return rq.refuse_rows([node[name] for name in ("routed", "shared", "x")], k)


def _plan(node: Node) -> Plan:
    rows, k = node.shape("tokens", "H")
    vectors = -(-k // rq.VECTOR)
    each = -(-vectors // MOST_THREADS)
    threads = rq.whole_warps(-(-vectors // each))
    single = node["w"].dtype is DType.F32
    macros = {"THREADS": threads, "VECS": each, "K": k, "W_F32": single}
    return node.plan(KERNEL.launch(node, rows, threads, macros))


def _cost(node: Node) -> float:
    return rq.seconds(node.specs, node["routed"].nbytes, node.target)


OP = serve(
    Op(
        name="shared_gate",
        operands=(
            operands.x("A[tokens,H]", name="routed"),
            operands.x("A[tokens,H]", name="shared"),
            operands.x("A[tokens,H]"),
            operands.weight("w", "W[1,H]"),
        ),
        results=(Result("y", "A[tokens,H]", note="routed + sigmoid(x·w)·shared"),),
        attrs={},
        reference=reference,
        body=body,
    ),
    (Candidate("row", "moe/shared_gate_fma.cu", _plan, _cost, _refuse),),
)
