"""The CUDA side of the gated norms: gated_norm and gated_norm_quant, one kernel."""

import math

from spark_engine.kernel import Attrs, Plan
from spark_engine.plugins.formats.quantised import BY_TOKEN
from spark_engine.plugins.kernels.common import row_quant as rq
from spark_engine.plugins.launch import Candidate, Kernel, Node

CHUNK = 2048  # columns of a block, about
MOST = 8192  # columns that one block can take
TOGETHER, MANY = 2, 8  # rows of a block, where there are MANY times as many as multiprocessors
KERNEL = Kernel("gated_norm_quant", f"o packed weight scales? {rq.OUTPUTS}")
SCALE_COLUMNS = 128  # of fp8_block; a block of threads begins at a multiple of it too


def _columns(node: Node) -> int:
    """Columns of a block: whole heads and whole scales of fp8_block, or the whole row."""
    k, dim = node.shape("K", "Dv")
    if node.text("quant") in BY_TOKEN:
        return k
    least = math.lcm(dim, SCALE_COLUMNS)
    return min(k, max(CHUNK // least, 1) * least)


def _rows(node: Node) -> int:
    """Rows of a block: several, with their loads in flight at once, where blocks are many."""
    rows, many = node.dim("tokens"), MANY * node.target.sms
    together = rows >= many and rows % TOGETHER == 0 and node.text("quant") not in BY_TOKEN
    return TOGETHER if together else 1


def _refuse(node: Node) -> str | None:
    k, dim = node.shape("K", "Dv")
    if dim % rq.VECTOR:
        return f"a head of {dim} columns; 16-byte loads want a multiple of {rq.VECTOR}"
    if (columns := _columns(node)) > MOST:
        return f"heads of {dim} need blocks of {columns} columns; at most {MOST} fit"
    return rq.refuse_rows((node["o"], node["packed"]), k) or rq.refuse_copies(node)


def _plan(node: Node) -> Plan:
    rows, k, dim, width = node.shape("tokens", "K", "Dv", "X")
    offset, columns = node.number("offset"), _columns(node)
    threads = rq.whole_warps(columns // rq.VECTOR)
    macros = rq.macros(
        node,
        k,
        THREADS=threads,
        COLUMNS=columns,
        DIM=dim,
        PACKED=width,
        OFFSET=offset,
        EPS=node.real("eps"),
        ROWS=_rows(node),
        Z_ALIGNED=offset % rq.VECTOR == 0 and width % rq.VECTOR == 0,
    )
    grid = -(-k // columns), rows // _rows(node)
    return node.plan(KERNEL.launch(node, grid, threads, macros))


def _cost(node: Node) -> float:
    rows, k = node.shape("tokens", "K")
    written = 2 * node.number("keep") + node.number("n")
    return rq.seconds((), rows * k * (4 + written), node.target)


def alone(attrs: Attrs) -> Attrs:
    """gated_norm as a gated_norm_quant that keeps y and quantises nothing."""
    return {**attrs, "keep": 1, "quant": "none", "n": 1}


CANDIDATES = (Candidate("heads", "delta_rule/gated_norm_quant_fma.cu", _plan, _cost, _refuse),)
