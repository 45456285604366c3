"""Planner of the ops that begin and end a round, and of block_rows.

A kernel's arguments are all operands and results of its op, then the number of threads with work.
"""

from spark_engine.kernel import Plan
from spark_engine.plugins.kernels.common import row_quant as rq
from spark_engine.plugins.launch import Candidate, Kernel, Node

SOURCE = "drafts/draft_rounds_scalar.cu"
THREADS = 128
ROWS = Kernel(
    "round_rows",
    "token_ids last_tokens drafts positions slots starts counts ids row_starts certain count",
)
ACCEPT = Kernel(
    "accept_drafts",
    "next_tokens ids token_counts last_tokens positions slots starts counts"
    " accepted draft_starts token_counts_out last_tokens_out positions_out count",
)
SHIFT = Kernel("shift_ids", "token_ids next_ids sampled counts ids count")
STORE = Kernel("store_ids", "ids page_table slots starts counts id_pages_out count")
BLOCK = Kernel(
    "block_rows", "last_tokens positions slots counts ids block_starts block_counts count"
)


def _cost(node: Node) -> float:
    return rq.LAUNCH_SECONDS


def _plan(kernel: Kernel, node: Node, count: int, **more: int) -> Plan:
    """A launch of `count` threads."""
    macros = {"THREADS": THREADS, "TILE": node.number("tile"), **more}
    grid = -(-count // THREADS)
    return node.plan(kernel.launch(node, grid, THREADS, macros, count=count))


def _plan_rows(node: Node) -> Plan:
    return _plan(ROWS, node, node.dim("tokens"), DRAFTS=node.dim("K"))


def _plan_accept(node: Node) -> Plan:
    return _plan(ACCEPT, node, node.dim("rows"), VOCAB=node.dim("V"))


def _plan_shift(node: Node) -> Plan:
    return _plan(SHIFT, node, node.dim("tokens"))


def _plan_store(node: Node) -> Plan:
    more = {"PAGE": node.dim("page"), "PAGES": node.dim("MP"), "IDS": node.number("vocab")}
    return _plan(STORE, node, node.dim("tokens"), **more)


def _plan_block(node: Node) -> Plan:
    tokens = node.dim("rows") * node.number("tile")
    return _plan(BLOCK, node, tokens, MASK=node.number("mask"))


ROUND_ROWS = (Candidate("tokens", SOURCE, _plan_rows, _cost),)
ACCEPT_DRAFTS = (Candidate("rows", SOURCE, _plan_accept, _cost),)
SHIFT_IDS = (Candidate("tokens", SOURCE, _plan_shift, _cost),)
STORE_IDS = (Candidate("tokens", SOURCE, _plan_store, _cost),)
BLOCK_ROWS = (Candidate("tokens", SOURCE, _plan_block, _cost),)
