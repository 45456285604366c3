"""Planner of `layer_norm`: a warp for each row, which its registers hold."""

from spark_engine.kernel import Plan
from spark_engine.plugins.kernels.common import row_quant as rq
from spark_engine.plugins.kernels.rowwise.rows_kernels import rows_once
from spark_engine.plugins.launch import Candidate, Kernel, Node

THREADS = 256
MOST = 16 * 32 * rq.VECTOR  # columns of a row
KERNEL = Kernel("layer_norm", "x weight bias y rows")


def _refuse(node: Node) -> str | None:
    columns = node.dim("K")
    if columns > MOST:
        return f"rows of {columns} columns; a warp takes {MOST} at most"
    return rq.refuse_rows((node["x"],), columns)


def _plan(node: Node) -> Plan:
    rows, columns = node.shape("tokens", "K")
    each = -(-columns // (32 * rq.VECTOR))
    macros = {"K": columns, "VECS": each, "EPS": node.real("eps"), "THREADS": THREADS}
    grid = -(-rows * 32 // THREADS)
    return node.plan(KERNEL.launch(node, grid, THREADS, macros, rows=rows))


CANDIDATES = (Candidate("warps", "vision/layer_norm_fma.cu", _plan, rows_once, _refuse),)
