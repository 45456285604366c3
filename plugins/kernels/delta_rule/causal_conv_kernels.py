"""The CUDA side of `causal_conv`: one launch for either tile; the state is updated in place."""

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


def plan(node: Node) -> Plan:
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
CANDIDATES = (Candidate("segments", SOURCE, plan, cost, refuse),)
