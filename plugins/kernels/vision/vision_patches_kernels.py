"""Planner of `vision_patches`: a block for each patch."""

from spark_engine.kernel import Plan
from spark_engine.plugins.kernels.common import row_quant as rq
from spark_engine.plugins.launch import Candidate, Kernel, Node

MOST_THREADS = 256
KERNEL = Kernel("vision_patches", "patches taps tap_weights pixels table x positions")


def _refuse(node: Node) -> str | None:
    if node.text("dtype") != "bf16":
        return f"x is {node.text('dtype')}; the kernels write bf16 activations"
    values, hidden = node.shape("P", "H")
    return rq.refuse_rows((), values) or rq.refuse_rows((node["table"],), hidden)


def _plan(node: Node) -> Plan:
    values, hidden, table = node.shape("P", "H", "T")
    threads = min(MOST_THREADS, rq.whole_warps(max(values, hidden) // rq.VECTOR))
    macros = {"P": values, "H": hidden, "TAPS": node.dim("taps"), "ROWS": table, "THREADS": threads}
    return node.plan(KERNEL.launch(node, node.dim("tokens"), threads, macros))


def _cost(node: Node) -> float:
    """An estimate: every array once, the table from L2."""
    made = node.dim("tokens") * sum(node.shape("P", "H")) * 2
    return rq.seconds(node.specs, made, node.target)


CANDIDATES = (Candidate("patches", "vision/vision_patches_fma.cu", _plan, _cost, _refuse),)
