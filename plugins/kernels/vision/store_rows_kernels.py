"""Planner of `store_rows`: a thread for each 16 bytes."""

from spark_engine.kernel import Plan
from spark_engine.plugins.kernels.common import row_quant as rq
from spark_engine.plugins.kernels.rowwise.rows_kernels import plan_rows, rows_once
from spark_engine.plugins.launch import Candidate, Kernel, Node

KERNEL = Kernel("store_rows", "x live first image_rows_out")


def _refuse(node: Node) -> str | None:
    return rq.refuse_rows((node["x"], node["image_rows"]), node.dim("H"))


def _plan(node: Node) -> Plan:
    own = {"GROUP": node.number("group"), "ROWS": node.dim("I")}
    return plan_rows(KERNEL, node, *node.shape("rows", "H"), **own)


CANDIDATES = (Candidate("rows", "vision/store_rows_copy.cu", _plan, rows_once, _refuse),)
