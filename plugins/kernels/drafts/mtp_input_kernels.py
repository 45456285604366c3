"""Planner of `mtp_input`: a block for each half of each row."""

from spark_engine.kernel import Plan
from spark_engine.plugins.kernels.common import row_quant as rq
from spark_engine.plugins.launch import Candidate, Kernel, Node

MOST_THREADS = 512
VECTORS = 4  # most 16-byte loads of a thread
KERNEL = Kernel("mtp_input", "ids hidden weight norm_e norm_h image_rows? y")


def _refuse(node: Node) -> str | None:
    h = node.dim("H")
    if h > rq.VECTOR * VECTORS * MOST_THREADS:
        return f"rows of {h} columns; up to {rq.VECTOR * VECTORS * MOST_THREADS} fit a block"
    tables = [node[name] for name in ("hidden", "weight", "image_rows") if name in node]
    return rq.refuse_rows(tables, h)


def _plan(node: Node) -> Plan:
    tokens, h, vocab = node.shape("tokens", "H", "V")
    vectors = h // rq.VECTOR
    per = next(n for n in range(1, VECTORS + 1) if vectors <= n * MOST_THREADS)
    threads = rq.whole_warps(-(-vectors // per))
    macros = {"H": h, "VOCAB": vocab, "THREADS": threads, "VECS": per, "EPS": node.real("eps")}
    macros |= {"IMAGES": node.dim("I")} if "image_rows" in node else {}
    return node.plan(KERNEL.launch(node, (2, tokens), threads, macros))


def _cost(node: Node) -> float:
    read = node["ids"], node["hidden"]
    return rq.seconds(read, node["hidden"].nbytes * 3, node.target)


CANDIDATES = (Candidate("halves", "drafts/mtp_input_fma.cu", _plan, _cost, _refuse),)
