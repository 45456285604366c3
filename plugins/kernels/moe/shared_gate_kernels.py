"""The CUDA side of `shared_gate`: one block a row."""

from spark_engine.kernel import Plan
from spark_engine.plugins.kernels.common import row_quant as rq
from spark_engine.plugins.launch import Candidate, Kernel, Node
from spark_engine.tensors import DType

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


CANDIDATES = (Candidate("row", "moe/shared_gate_fma.cu", _plan, _cost, _refuse),)
