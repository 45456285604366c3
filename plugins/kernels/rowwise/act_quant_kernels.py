"""Planner of the element-wise ops: silu_mul, sigmoid_gate, act_quant, the *_quant ops.

All use one kernel, `act_quant_fma.cu`: an activation or none, then bf16 and quantised copies.
"""

from spark_engine.kernel import DECLARED, Early, Plan
from spark_engine.plugins.formats.quantised import BY_TOKEN
from spark_engine.plugins.kernels.common import row_quant as rq
from spark_engine.plugins.launch import Candidate, Kernel, Node, Whole
from spark_engine.tensors import TensorSpec

THREADS = 256
CLUSTER = 8  # blocks that share each of few rows of at least LONG columns
LONG = 8192
# Of more rows than multiprocessors, by token: threads of a block, at most, and of the blocks that a
# multiprocessor holds by their registers, so that some load while others compute.
ROW_THREADS, RESIDENT = 320, 1536
MOST_TOKEN = 4 * rq.MOST_THREADS * rq.VECTOR  # columns of a row that one block takes
_ACT = {"none": 0, "silu_mul": 1, "sigmoid_gate": 2}
ACT_QUANT = Kernel("act_quant", f"x qkv? scales? {rq.OUTPUTS}", early=Early(begins=True, lets=True))


def _rows(node: Node) -> tuple[int, int]:
    """Rows and columns of y."""
    rows, k = node["x"].dims
    return rows, k // 2 if node.text("act") == "silu_mul" else k


def _activations(node: Node) -> tuple[TensorSpec, ...]:
    return (node["x"], node["qkv"]) if "qkv" in node else (node["x"],)


def _refuse(node: Node) -> str | None:
    _, k = _rows(node)
    reason = rq.refuse_rows(_activations(node), k) or rq.refuse_copies(node)
    if reason is None and node.text("quant") in BY_TOKEN and k > MOST_TOKEN:
        return f"a row of {k} does not fit the registers of a block; at most {MOST_TOKEN} do"
    if reason is None and "qkv" in node:
        widths = ("head_dim", node.number("head_dim")), ("qkv's row", node["qkv"].dims[1])
        for what, value in widths:
            if value % rq.VECTOR:
                return f"{what} is {value}; 16-byte loads need a multiple of {rq.VECTOR}"
    return reason


def _plan(node: Node) -> Plan:
    rows, k = _rows(node)
    shared, more = 0, {"BLOCKS": 1}
    threads = min(THREADS, rq.whole_warps(-(-k // rq.VECTOR)))
    chunks = -(-k // (threads * rq.VECTOR))
    if node.text("quant") in BY_TOKEN:
        few = node.target.clusters and rows <= node.target.sms and k >= LONG
        more["PARTS"] = chunks = CLUSTER if few else 1
        most = ROW_THREADS if rows > node.target.sms else rq.MOST_THREADS
        threads, more["VECS"] = rq.threads_of(-(-k // chunks), most)
        registers = 20 + 4 * more["VECS"]  # of a thread, at least
        more["BLOCKS"] = max(1, min(RESIDENT, 65536 // registers) // threads)
        shared = DECLARED
    if "qkv" in node:
        more |= {"HEAD_DIM": node.number("head_dim"), "QKV": node["qkv"].dims[1]}
    macros = rq.macros(node, k, THREADS=threads, ACT=_ACT[node.text("act")], **more)
    cluster = more.get("PARTS", 1)
    launch = ACT_QUANT.launch(node, (chunks, rows), threads, macros, shared, cluster)
    return node.plan(launch)


def _cost(node: Node) -> float:
    rows, k = _rows(node)
    made = rows * k * (2 * node.number("keep") + node.number("n"))
    return rq.seconds(_activations(node), made, node.target)


def alone(act: str, quant: str) -> Whole:
    """A function that completes the attributes of a part of act_quant to those of act_quant."""
    keep = int(quant == "none")
    return lambda attrs: {**attrs, "act": act, "quant": quant, "keep": keep, "n": 1}


CANDIDATES = (Candidate("elementwise", "rowwise/act_quant_fma.cu", _plan, _cost, _refuse),)
