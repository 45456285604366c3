"""Planner of `draft_token` and `draft_best`: many blocks a row; the last to arrive writes it."""

from spark_engine.kernel import Plan, Scratch
from spark_engine.plugins.kernels.common import row_quant as rq
from spark_engine.plugins.launch import Candidate, Kernel, Node

THREADS = 256
WIDTH = 4  # logits of one load
FEW, MANY = 2, 8  # loads of a thread
TOKEN = Kernel(
    "draft_token",
    "logits shortlist? slots starts counts token next_starts drafts_out best_so_far arrived",
)
BEST_OF = Kernel("draft_best", "logits first slots counts best best_so_far arrived")


def _loads(node: Node) -> int:
    """Loads of a thread: few, if the rows are too few to fill the GPU otherwise."""
    rows, logits = node["logits"].dims
    blocks = rows * -(-logits // (THREADS * WIDTH * MANY))
    return MANY if blocks >= 8 * node.target.sms else FEW


def _refuse(node: Node) -> str | None:
    _, logits = node["logits"].dims
    if logits % WIDTH:
        return f"a row of {logits} logits; pad the vocabulary to a multiple of {WIDTH}"
    return None


def _planned(kernel: Kernel, node: Node, **more: int) -> Plan:
    (rows, logits), loads = node["logits"].dims, _loads(node)
    grid = (-(-logits // (THREADS * WIDTH * loads)), rows)
    macros = {"LOGITS": logits, "VOCAB": node.number("vocab"), "LOADS": loads, "THREADS": THREADS}
    best, arrived = Scratch(8 * rows, zeroed=True), Scratch(4 * rows, zeroed=True)
    node = node.with_scratch(best_so_far=best, arrived=arrived)
    return node.plan(kernel.launch(node, grid, THREADS, macros | more))


def _plan(node: Node) -> Plan:
    macros = {"DRAFTS": node.dim("K"), "INDEX": node.number("index")}
    macros["SHORTLIST"] = node.number("shortlist")
    if pairs := node.number("pairs"):
        macros["PAIRS"] = pairs
    return _planned(TOKEN, node, **macros)


def _plan_best(node: Node) -> Plan:
    return _planned(BEST_OF, node, SHORTLIST=0, BEST=1)


def _cost(node: Node) -> float:
    return node["logits"].nbytes / node.target.bandwidth + rq.LAUNCH_SECONDS


SOURCE = "drafts/draft_token_atomic.cu"
BEST = (Candidate("parts", SOURCE, _plan_best, _cost, _refuse),)
CANDIDATES = (Candidate("parts", SOURCE, _plan, _cost, _refuse),)
