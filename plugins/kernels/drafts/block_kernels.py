"""Planner of block_conv, top_ids and draft_path, of a block drafter."""

from spark_engine.kernel import Plan, Scratch
from spark_engine.plugins.kernels.common import row_quant as rq
from spark_engine.plugins.launch import Candidate, Kernel, Node

THREADS = 128  # of block_conv
SELECTORS, WIDTH = 256, 4  # threads of top_ids, logits of one load
LOADS = (1, 2, 4, 8)  # of a thread: as few as keep a token's keys within the last block's registers
MOST_KEYS = 4
WARPS = 16  # of draft_path
CONV_KERNEL = Kernel("block_conv", "x deltas base y")
TOP_KERNEL = Kernel("top_ids", "logits shortlist? counts ids values found arrived")
PATH_KERNEL = Kernel(
    "draft_path",
    "ids values query predecessor successor last_tokens slots counts drafts_out",
)


def _groups(node: Node) -> int:
    return int(node["deltas"].shape[1]) // 4


def _refuse_conv(node: Node) -> str | None:
    size = node.dim("H") // _groups(node)
    if size % rq.VECTOR:
        return f"groups of {size} columns; a thread has {rq.VECTOR} of one group"
    return rq.refuse_rows([node["x"], node["deltas"]], node.dim("H"))


def _plan_conv(node: Node) -> Plan:
    tokens, h = node.shape("tokens", "H")
    macros = {"H": h, "GROUP": h // _groups(node), "TILE": node.number("tile")}
    macros |= {"SIDE": node.number("side"), "THREADS": THREADS}
    grid = -(-h // (rq.VECTOR * THREADS)), tokens
    return node.plan(CONV_KERNEL.launch(node, grid, THREADS, macros))


def _cost_conv(node: Node) -> float:
    return rq.seconds((node["x"], node["deltas"]), node["x"].nbytes, node.target)


def _refuse_top(node: Node) -> str | None:
    if node.dim("Vd") % WIDTH:
        return f"a token has {node.dim('Vd')} logits; pad the vocabulary to a multiple of {WIDTH}"
    if _parts(node, LOADS[-1]) * node.number("top") > MOST_KEYS * SELECTORS:
        return f"{node.dim('Vd')} logits of a token are too many for {node.number('top')} of them"
    return None


def _parts(node: Node, loads: int) -> int:
    return -(-node.dim("Vd") // (SELECTORS * WIDTH * loads))


def _plan_top(node: Node) -> Plan:
    tokens, top = int(node["logits"].dims[0]), node.number("top")
    loads = next(n for n in LOADS if _parts(node, n) * top <= MOST_KEYS * SELECTORS)
    parts = _parts(node, loads)
    macros = {"LOGITS": node.dim("Vd"), "VOCAB": node.number("vocab"), "TOP": top}
    macros |= {"SHORTLIST": node.number("shortlist"), "TILE": node.number("tile")}
    macros |= {"LOADS": loads, "PARTS": parts, "THREADS": SELECTORS}
    arrived = Scratch(4 * tokens, zeroed=True)
    node = node.with_scratch(found=8 * tokens * parts * top, arrived=arrived)
    return node.plan(TOP_KERNEL.launch(node, (parts, tokens), SELECTORS, macros))


def _cost_top(node: Node) -> float:
    return node["logits"].nbytes / node.target.bandwidth + 3 * rq.LAUNCH_SECONDS


def _refuse_path(node: Node) -> str | None:
    if node.dim("R") % 2:
        return f"a rank of {node.dim('R')}; a lane reads two columns"
    return rq.refuse_rows([node[n] for n in ("query", "predecessor", "successor")], rq.VECTOR)


def _plan_path(node: Node) -> Plan:
    macros = {"TILE": node.number("tile"), "TOP": node.dim("top"), "RANK": node.dim("R")}
    macros |= {"DRAFTS": node.dim("K"), "WARPS": WARPS}
    return node.plan(PATH_KERNEL.launch(node, node.dim("rows"), 32 * WARPS, macros))


def _cost_path(node: Node) -> float:
    return (node.number("tile") + 1) * rq.LAUNCH_SECONDS


CONV = (Candidate("columns", "drafts/block_conv_fma.cu", _plan_conv, _cost_conv, _refuse_conv),)
TOP_IDS = (Candidate("parts", "drafts/top_ids_fma.cu", _plan_top, _cost_top, _refuse_top),)
PATH = (Candidate("rows", "drafts/draft_path_fma.cu", _plan_path, _cost_path, _refuse_path),)
