"""Planner of `match_drafts`: blocks share the places of a row; the last to arrive writes it."""

from spark_engine.interface import MOST_MATCH
from spark_engine.kernel import Plan, Scratch
from spark_engine.plugins.kernels.common import row_quant as rq
from spark_engine.plugins.launch import Candidate, Kernel, Node

THREADS = 256
WIDTH = 4  # ids of one load
LOADS, MOST_PARTS = 4, 16  # loads of a thread for the longest text; blocks of a row
KERNEL = Kernel(
    "match_drafts",
    "id_pages page_table last_tokens slots starts counts matched drafts_out best_so_far arrived",
)


def _refuse(node: Node) -> str | None:
    page = node.dim("page")
    return f"pages of {page} tokens; a multiple of {WIDTH} is read" if page % WIDTH else None


def _plan(node: Node) -> Plan:
    rows, page, pages = node.shape("rows", "page", "MP")
    parts = min(MOST_PARTS, -(-page * pages // (THREADS * WIDTH * LOADS)))
    macros = {"PAGE": page, "PAGES": pages, "DRAFTS": node.dim("K"), "LEAST": node.number("least")}
    macros |= {"HELD": node.number("held"), "MOST": MOST_MATCH, "LOADS": LOADS, "THREADS": THREADS}
    best, arrived = Scratch(8 * rows, zeroed=True), Scratch(4 * rows, zeroed=True)
    node = node.with_scratch(best_so_far=best, arrived=arrived)
    return node.plan(KERNEL.launch(node, (parts, rows), THREADS, macros))


def _cost(node: Node) -> float:
    return rq.LAUNCH_SECONDS


CANDIDATES = (Candidate("parts", "drafts/match_drafts_atomic.cu", _plan, _cost, _refuse),)
