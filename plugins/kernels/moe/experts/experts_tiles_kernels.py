"""The tactics `tiles` and `tiles_128` of `grouped_moe` without wgmma: by mma.sync
(experts_tiles_mma.cu) and by FP4 instructions (experts_tiles_fp4_sm120.cu).

For targets without wgmma, and formats that the wide kernels do not take. `tiles` cuts tiles of 64
tokens and adds a dot product in the parts that `grouped` has: it has its bits. `tiles_128` cuts
tiles of 128 with one sum, k ascending, and parts of bf16.

FP4 instructions are W4A4's: native on sm_121a, emulated where it is rehearsed. Few tokens read
weights and little else, whatever the instruction: they stay with `grouped`.
"""

from collections.abc import Callable
from functools import partial

from spark_engine.kernel import DECLARED, Launch, Plan, Target
from spark_engine.plugins.formats import expert_layout as et
from spark_engine.plugins.kernels.gemm.linear_nvfp4_a4_kernels import FP4_RATE
from spark_engine.plugins.kernels.moe.experts import experts_wide_kernels as wide
from spark_engine.plugins.kernels.moe.experts.experts_problem import (
    THREADS,
    WARPS,
    Problem,
    by_parts,
    combine,
    macros,
    operand,
    refuse,
    weights,
)
from spark_engine.plugins.launch import Candidate, Kernel, Macros, Node

SORT_THREADS = 1024
SORT_BLOCKS = 32
COUNT = Kernel("moe_count", "ids ranks tokens")
PLACE = Kernel("moe_sort", "ids ranks order tiles tokens")
SORT = {"SORT_BLOCKS": SORT_BLOCKS}  # a macro
# Of a library's rate: what mma.sync reaches, on Hopper next to wgmma and elsewhere.
HOPPER_RATE, OTHER_RATE = 0.45, 0.75


def refuse_tiles(node: Node, tiling: wide.Tiling) -> str | None:
    """Refuses inputs with scales that no bf16 holds, and few tokens of `_128`."""
    if reason := refuse(node):
        return reason
    p = Problem.of(node)
    if p.quant and not p.form.static:
        return f"format {p.kind} has scales of its input's rows; these kernels take none"
    if 2 * p.pairs * max(p.hidden, p.inner) >= 1 << 32:
        return f"{p.pairs} rows of {max(p.hidden, p.inner)} are beyond offsets of 32 bits"
    if tiling is wide.ASCENDING and p.tokens < wide.FEWEST:
        return f"{p.tokens} tokens; tiles of {tiling.block_m} want {wide.FEWEST}"
    return None


def sort(node: Node, p: Problem, sizes: Macros) -> list[Launch]:
    """Pairs by expert, cut into tiles."""
    return [
        kernel.launch(node, SORT_BLOCKS, SORT_THREADS, sizes, tokens=p.tokens)
        for kernel in (COUNT, PLACE)
    ]


def sort_memory(p: Problem, block_m: int) -> dict[str, int]:
    """Scratch memory of `sort`; behind the ranks, what each block counts of each expert."""
    ranks = p.pairs + SORT_BLOCKS * p.experts
    tiles = 1 + wide.most_tiles(p, block_m)
    return {"order": p.pairs * 4, "tiles": tiles * 16, "ranks": ranks * 4}


def _product(
    node: Node, p: Problem, sizes: Macros, tiles: int, symbol: str, args: str, weight: str,
    rest: str, panels: int,
) -> Launch:  # fmt: skip
    """Rows times a weight: a block takes four panels of a tile, then the next."""
    blocks = min(node.target.sms, tiles * -(-panels // 4))
    kernel = Kernel(symbol, f"{args} order tiles {weights(p, weight)} {rest}")
    return kernel.launch(node, blocks, THREADS, sizes, DECLARED)


def plan_tiles(node: Node, tiling: wide.Tiling) -> Plan:
    """count, sort, [quantise], up, down, combine."""
    p, target = Problem.of(node), node.target
    tuning = {"BLOCK_M": tiling.block_m, "QUANT": p.quant, "SHARED_LIMIT": target.shared_bytes}
    sizes = macros(p, **tiling.tuning, **tuning, **SORT)
    most = wide.most_tiles(p, tiling.block_m)
    memory = sort_memory(p, tiling.block_m)
    memory |= {"h": p.pairs * p.inner * 2, "parts": p.pairs * p.hidden * tiling.part_bytes}
    if p.quant:
        memory["codes"] = p.pairs * p.hidden * 2
    node = node.with_scratch(**memory)
    given = [operand(p, n, "w2") if p.quant else "nothing?" for n in ("x_scale", "h_scale")]
    product = partial(_product, node, p, sizes, most)
    launches, x = sort(node, p, sizes), "x"
    if p.quant:
        quantise = Kernel("quantise_x", f"x ids {given[0]} codes")
        launches.append(quantise.launch(node, p.pairs, WARPS * 32, sizes))
        x = "codes"
    launches += [
        product("tile_up", x, "w13", f"{given[0]} {given[1]} h", -(-p.inner // 32)),
        product("tile_down", "h", "w2", f"{given[1]} parts", -(-p.hidden // 64)),
        combine(node, p, sizes),
    ]
    return node.plan(*launches)


def seconds(p: Problem, target: Target, rate: float, row_bytes: float) -> float:
    """Reading weights or multiplying at `rate`, whichever is longer, or, on Hopper, both, as
    measured of `wide`; `row_bytes` moved for each pair; launches. Predicted, not measured."""
    columns = 16 * max(1.0, p.pairs / p.hit / 16 + 0.5)  # of an expert: whole groups of sixteen
    multiply = 6 * p.hit * columns * p.hidden * p.inner / rate
    read = 1.2 * p.hit * p.expert_bytes / target.bandwidth
    both = read + multiply if target.wgmma else max(read, multiply)
    return both + p.pairs * row_bytes / target.bandwidth + 20e-6


def cost_tiles(node: Node, tiling: wide.Tiling) -> float:
    """`seconds` at the rate of mma.sync; the rows are h, parts and what a format quantises."""
    p, target = Problem.of(node), node.target
    rate = target.bf16_flops * (HOPPER_RATE if target.wgmma else OTHER_RATE)
    rows = 2 * tiling.part_bytes * p.hidden + 4 * p.inner + (4 * p.hidden if p.quant else 0)
    return seconds(p, target, rate, rows)


def _candidate(
    name: str, tiling: wide.Tiling, key: Callable[[Node], str] | None = None
) -> Candidate:
    refusal, plan = partial(refuse_tiles, tiling=tiling), partial(plan_tiles, tiling=tiling)
    cost = partial(cost_tiles, tiling=tiling)
    return Candidate(name, "moe/experts/experts_tiles_mma.cu", plan, cost, refusal, key)


TILES = _candidate("tiles", wide.BY_PARTS, by_parts)
TILES_128 = _candidate("tiles_128", wide.ASCENDING)

FP4_BLOCK_M = wide.ASCENDING.block_m
QUANTISE_FP4 = Kernel("quantise_rows", "x ids order x_scale codes block_scales")


def plan_fp4(node: Node) -> Plan:
    """count, sort, quantise, up (which quantises), down, combine."""
    p, target = Problem.of(node), node.target
    most = wide.most_tiles(p, FP4_BLOCK_M)
    tuning = {"BLOCK_M": FP4_BLOCK_M, "QUANT": p.quant, "SHARED_LIMIT": target.shared_bytes}
    sizes = macros(p, **wide.ASCENDING.tuning, **tuning, **SORT)
    hidden, inner = (-(-k // et.KSLAB) for k in (p.hidden, p.inner))
    node = node.with_scratch(
        **sort_memory(p, FP4_BLOCK_M),
        h=p.pairs * inner * 32,
        parts=p.pairs * p.hidden * wide.ASCENDING.part_bytes,
        codes=p.pairs * hidden * 32,
        block_scales=p.pairs * hidden * 4,
        h_block_scales=p.pairs * inner * 4,
    )
    product = partial(_product, node, p, sizes, most)
    up = "x_scale h_scale h h_block_scales"
    return node.plan(
        *sort(node, p, sizes),
        QUANTISE_FP4.launch(node, p.pairs, 256, sizes),
        product("tile_up", "codes block_scales", "w13", up, -(-p.inner // 32)),
        product("tile_down", "h h_block_scales", "w2", "h_scale parts", -(-p.hidden // 64)),
        combine(node, p, sizes),
    )


def cost_fp4(node: Node) -> float:
    """As the other tiles, at the rate of the FP4 instruction. Predicted."""
    p, target = Problem.of(node), node.target
    rate = 0.5 * FP4_RATE * target.bf16_flops
    rows = wide.ASCENDING.part_bytes * 2 * p.hidden + 1.2 * (p.hidden + p.inner)
    return seconds(p, target, rate, rows)


TILES_FP4 = Candidate(
    "tiles_fp4",
    "moe/experts/experts_tiles_fp4_sm120.cu",
    plan_fp4,
    cost_fp4,
    wide.refuse_wide_128,
)
