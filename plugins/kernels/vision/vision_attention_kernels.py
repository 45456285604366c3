"""Planners of `vision_attention`: queries, keys and values as tiles, then attention over tiles."""

import math
from functools import partial

from spark_engine.kernel import DECLARED, Plan
from spark_engine.plugins.launch import Candidate, Kernel, Node
from spark_engine.tensors import DType

_MMA, _WGMMA = "vision/vision_attention_mma.cu", "vision/vision_attention_wgmma_sm90.cu"
TURN = Kernel(
    "vision_turn",
    "qkv coords inv_freq live queries keys values rows",
    source="vision/vision_attention_turn_fma.cu",
)
_TILES = "queries keys values live y rows"
ATTEND = Kernel("vision_attend", _TILES)
GROUPS = Kernel("vision_attend_groups", _TILES)
PATCHES = 8  # of a block of `vision_turn`
QUERIES = 64  # of a tile, and of a consumer warpgroup
KEYS = 64  # of a tile of `vision_attend`
BLOCK = 128  # queries of a block of `vision_attend`
MOST = 128  # dimensions of a head, at most: its sums are in registers
WIDE = (64, 80)  # padded dimensions of a head with a form of wgmma
# By the number of consumer warpgroups: keys of a tile, registers of a thread of a consumer and of
# the producer. With 128 keys three consumers spill.
SIZES = {2: (128, 240, 24), 3: (96, 160, 32)}


def refuse_attend(node: Node) -> str | None:
    """Why no kernel takes the node, or None."""
    dim, dtype = node.dim("D"), node["qkv"].dtype
    if dtype is not DType.BF16:
        return f"qkv is {dtype}, not bf16"
    if dim % 8 or dim > MOST:
        return f"heads of {dim} dimensions are not of a multiple of 8 up to {MOST}"
    return None


def refuse_groups(node: Node) -> str | None:
    """Why `vision_attend_groups` does not take the node, or None."""
    if not node.target.wgmma:
        return f"{node.target.name} has no warpgroup matrix instructions"
    if padded(node) not in WIDE:
        least, most = WIDE[0] - 15, WIDE[-1]
        return f"heads of {node.dim('D')} dimensions are not of {least} to {most}"
    return refuse_attend(node)


def padded(node: Node) -> int:
    """Dimensions of a head in tiles: steps of 16."""
    return -(-node.dim("D") // 16) * 16


def _plan(
    node: Node, kernel: Kernel, keys: int, queries: int, threads: int, **numbers: int
) -> Plan:
    """`vision_turn` over patches, then `kernel` over blocks of `queries` and heads."""
    heads, step = node.number("heads"), math.lcm(keys, queries)
    rows = -(-node.dim("tokens") // step) * step
    macros = {"HEADS": heads, "HEAD_DIM": node.dim("D"), "KEYS": keys}
    size = heads * rows * padded(node) * 2
    node = node.with_scratch(queries=size, keys=size, values=size)
    grid = (rows // queries, heads)
    turn = TURN.launch(node, rows // PATCHES, 256, macros, rows=rows)
    whole = {**macros, **numbers}
    return node.plan(turn, kernel.launch(node, grid, threads, whole, DECLARED, rows=rows))


def plan_attend(node: Node) -> Plan:
    """Blocks of eight warps of 16 queries."""
    return _plan(node, ATTEND, KEYS, BLOCK, 256)


def plan_groups(node: Node, consumers: int) -> Plan:
    """Blocks of `consumers` warpgroups of 64 queries, and one that copies."""
    keys, most, rest = SIZES[consumers]
    return _plan(
        node, GROUPS, keys, QUERIES * consumers, 128 * (consumers + 1),
        CONSUMERS=consumers, CONSUMER_REGISTERS=most, PRODUCER_REGISTERS=rest,
    )  # fmt: skip


def _cost(node: Node, share: float, queries: int, resident: int) -> float:
    """Seconds: the products at `share` of a library's rate by waves of blocks; what `vision_turn`
    reads and writes; two launches."""
    tokens, heads, target = node.dim("tokens"), node.number("heads"), node.target
    blocks, wave = -(-tokens // queries) * heads, target.sms * resident
    block = 4 * queries * tokens * padded(node)
    products = -(-blocks // wave) * wave * block / (target.bf16_flops * share)
    return products + 12 * tokens * heads * padded(node) / target.bandwidth + 8e-6


def _cost_attend(node: Node) -> float:
    return _cost(node, 1 / 3 if node.target.wgmma else 0.6, BLOCK, 2)


def _groups(consumers: int, share: float) -> Candidate:
    cost = partial(_cost, share=share, queries=QUERIES * consumers, resident=1)
    plan = partial(plan_groups, consumers=consumers)
    why = (
        f"{consumers} warpgroups share the tiles of keys: benchmarks/log/vision/vision_attention.md"
    )
    return Candidate(
        f"groups_{consumers}", _WGMMA, plan, cost, refuse_groups, why=why, form="groups"
    )


TILES = Candidate(
    "tiles", _MMA, plan_attend, _cost_attend, refuse_attend,
    why="targets without wgmma: benchmarks/log/vision/vision_attention.md",
)  # fmt: skip
CANDIDATES = (TILES, _groups(2, 0.6), _groups(3, 0.65))
