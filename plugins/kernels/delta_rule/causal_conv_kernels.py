"""The CUDA side of `causal_conv`: one launch for either tile; the state is updated in place."""

from functools import partial

from spark_engine.interface import PREFILL_TILE
from spark_engine.kernel import Plan
from spark_engine.plugins.launch import Candidate, Kernel, Node
from spark_engine.tensors import DType

CHANNELS = 512  # of one block
SEGMENT = 8  # tokens that one thread slides over
KERNEL = Kernel(
    "causal_conv",
    "x width channels weight conv_state state_out slots starts counts sources? saves? c rows",
)


def refuse(node: Node) -> str | None:
    """Refuses channels that do not come in fours."""
    channels = node.dim("C")
    if channels % 4:
        return f"{channels} channels are not computed four at a time"
    return None


def refuse_words(node: Node) -> str | None:
    """Refuses what is not a prefill of bf16 with rows that begin at whole 8 bytes."""
    x, tile = node["x"], node.number("tile")
    if tile != PREFILL_TILE:
        return f"tiles of {tile} tokens; those of a prefill are served"
    if x.dtype is not DType.BF16 or node.dim("X") % 4:
        return f"x is {x}; bf16 and a multiple of 4 columns are served"
    return refuse(node)


def plan(node: Node, words: bool = False) -> Plan:
    """Blocks of channels x rows x segments of a tile."""
    rows, tile = node.dim("rows"), node.number("tile")
    width, channels, taps = node.shape("X", "C", "K")
    segment = min(tile, SEGMENT)
    macros = {
        "ACT_F32": node["x"].dtype is DType.F32,
        "ALIGNED": width % 4 == 0,
        "DRAFTS": node.number("drafts"),
        "SEGMENT": segment,
        "TAPS": taps,
        "TILE": tile,
    }
    if words:
        macros["WORDS"] = 1
    if tile == 1 and not macros["DRAFTS"] and not node.target.large_shared:
        macros["BLOCKS"] = 9  # a multiprocessor: ten leave too few registers there
    grid = (-(-channels // CHANNELS), rows, tile // segment)
    launch = KERNEL.launch(node, grid, 128, macros, width=width, channels=channels, rows=rows)
    return node.plan(launch)


def cost(node: Node) -> float:
    """Each column read and written once, the state too, and a launch."""
    channels, taps = node.shape("C", "K")
    moved = 2 * node.dim("tokens") + 2 * (taps - 1) * node.dim("rows")
    return 1.3 * moved * channels * node["x"].dtype.itemsize / node.target.bandwidth + 3e-6


SOURCE = "delta_rule/causal_conv_fma.cu"
CANDIDATES = (
    Candidate("segments", SOURCE, plan, cost, refuse, why="widths that are no multiples of words"),
    # 0.84 to 0.86 of the other's time on an H200
    Candidate("words", SOURCE, partial(plan, words=True), lambda n: 0.85 * cost(n), refuse_words),
)
