"""Planner of `mark_tokens`: one launch clears the rows of fresh sequences and counts tokens."""

from spark_engine.interface import PREFILL_TILE
from spark_engine.kernel import Plan
from spark_engine.plugins.kernels.common import row_quant as rq
from spark_engine.plugins.launch import Candidate, Kernel, Node

BLOCK = 256
DECODE_PARTS, PREFILL_PARTS = 4, 64
MARK = Kernel("mark", "token_counts_out token_ids last_tokens slots starts counts prompt_lens rows")


def _plan(node: Node) -> Plan:
    vocab, rows, tile = node.dim("V"), node.dim("rows"), node.number("tile")
    parts = PREFILL_PARTS if tile == PREFILL_TILE else DECODE_PARTS
    macros = {"VOCAB": vocab, "TILE": tile, "THREADS": BLOCK, "PARTS": parts}
    return node.plan(MARK.launch(node, (parts, rows), BLOCK, macros, rows=rows))


def _cost(node: Node) -> float:
    return rq.LAUNCH_SECONDS


CANDIDATES = (Candidate("pieces", "sampling/mark_tokens_atomic.cu", _plan, _cost),)
