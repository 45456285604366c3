"""Planner of copies and sums of whole rows: embed, last_rows and the standard Add."""

from __future__ import annotations

from spark_engine.kernel import Plan
from spark_engine.plugins.kernels.common import row_quant as rq
from spark_engine.plugins.launch import Candidate, Kernel, Node, standard
from spark_engine.tensors import DType

SOURCE = "rowwise/rows_copy.cu"
THREADS = 256
EMBED_ROWS = Kernel("embed", "token_ids last_tokens slots weight x")
LAST = Kernel("last_rows", "x counts y")
SUM = Kernel("add", "a b y")


def _plan(kernel: Kernel, node: Node, rows: int, h: int, **macros: int) -> Plan:
    vectors = h // rq.VECTOR
    threads = min(THREADS, rq.whole_warps(vectors))
    grid, macros = (-(-vectors // threads), rows), {"THREADS": threads, "H": h, **macros}
    return node.plan(kernel.launch(node, grid, threads, macros))


def _refuse_embed(node: Node) -> str | None:
    if node.text("dtype") != DType.BF16:
        return f"dtype is {node.text('dtype')}; the kernels make bf16 activations"
    return rq.refuse_rows((node["weight"],), node.dim("H"))


def _plan_embed(node: Node) -> Plan:
    macros = {"TILE": node.number("tile"), "VOCAB": node.dim("V"), "SLOTS": node.dim("S+1")}
    return _plan(EMBED_ROWS, node, *node.shape("tokens", "H"), **macros)


def _cost_embed(node: Node) -> float:
    return rq.seconds((), node.dim("tokens") * node.dim("H") * 4, node.target)


def _refuse_last(node: Node) -> str | None:
    return rq.refuse_rows((node["x"],), node.dim("H"))


def _plan_last(node: Node) -> Plan:
    return _plan(LAST, node, *node.shape("rows", "H"), TILE=node.number("tile"))


def _cost_last(node: Node) -> float:
    return rq.seconds((), node.dim("rows") * node.dim("H") * 4, node.target)


def _refuse_add(node: Node) -> str | None:
    a, b = node["a"], node["b"]
    if a.shape != b.shape:
        return f"{a.name} is {list(a.shape)} and {b.name} {list(b.shape)}; one shape is added"
    return rq.refuse_rows((a, b), a.dims[1])


def _plan_add(node: Node) -> Plan:
    return _plan(SUM, node, *node["a"].dims)


def _cost_add(node: Node) -> float:
    return rq.seconds(node.specs, node["a"].nbytes, node.target)


EMBED = (Candidate("rows", SOURCE, _plan_embed, _cost_embed, _refuse_embed),)
LAST_ROWS = (Candidate("rows", SOURCE, _plan_last, _cost_last, _refuse_last),)
ADDED = (Candidate("rows", SOURCE, _plan_add, _cost_add, _refuse_add),)
ADD = standard("Add", ADDED, lambda count: ("a", "b"), "y")
