"""The tactics `tiles` and `tiles_128` of `grouped_moe` (moe_tiles.cu): many tokens, by mma.sync.

For targets without wgmma, and formats that the wide kernels do not take; where wgmma serves, it is
cheaper. `tiles` cuts tiles of 64 tokens and adds a dot product in the parts that `grouped` has: it
has its bits. `tiles_128` cuts tiles of 128 with one sum, k ascending, and parts of bf16.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from spark_engine.kernel import (
    NULL,
    Arg,
    Attrs,
    Launch,
    Plan,
    Scalar,
    Scratch,
    Specs,
    Tactic,
    Target,
)
from spark_engine.plugins.moe.moe_problem import (
    M16_BYTES,
    THREADS,
    WARPS,
    Defines,
    Problem,
    by_parts,
    combine,
    inputs,
    macros,
    operand,
    problem,
    refuse,
    scratch,
    weights,
)
from spark_engine.plugins.moe.moe_wide_cuda import (
    ASCENDING,
    BY_PARTS,
    FEWEST,
    Key,
    Tiling,
    most_tiles,
)

MOST_STAGES = 6
RESERVED = 1024  # bytes of shared memory that the driver takes
BARRIER = 16  # bytes
SORT_THREADS = 1024
SORT_BLOCKS = 32
SORT = {"SORT_BLOCKS": SORT_BLOCKS}  # a macro
# Of a library's rate: what mma.sync reaches, on Hopper beside wgmma and elsewhere.
HOPPER_RATE, OTHER_RATE = 0.45, 0.75


@dataclass(frozen=True)
class Stage:
    """Bytes of a ring's stage, and the stages that fit in shared memory.

    Attributes:
        rows: of the tokens' rows. A slot more of them lets warps be half a stage apart.
        own: of the rest.
    """

    rows: int
    own: int

    def slack(self, target: Target) -> int:
        """Slots of rows beside those of stages: 1 where three stages fit beside it."""
        return int(self._stages(target, self.rows + BARRIER) > 2)

    def depth(self, target: Target) -> int:
        """How many; fewer than 2 serve no one."""
        return self._stages(target, self.slack(target) * (self.rows + BARRIER))

    def nbytes(self, target: Target) -> int:
        """Of the whole ring."""
        slack = self.slack(target) * (self.rows + BARRIER)
        return self._stages(target, slack) * (self.rows + self.own) + slack

    def _stages(self, target: Target, beside: int) -> int:
        free = target.shared_bytes - RESERVED - beside
        return min(MOST_STAGES, free // (self.rows + self.own))


def _stage(p: Problem, tiling: Tiling) -> Stage:
    return Stage(tiling.block_m * (128 + 4), 16 * M16_BYTES[p.weights])


def refuse_tiles(attrs: Attrs, specs: Specs, target: Target, tiling: Tiling) -> str | None:
    """Refuses scales along k that no bf16 holds, a small shared memory, few tokens of `_128`."""
    reason = refuse(attrs, specs)
    if reason:
        return reason
    p = problem(attrs, specs)
    if p.kind == "fp8_block":
        return f"format {p.kind} has scales along k that are no codes' own; these kernels take none"
    if 2 * p.pairs * max(p.hidden, p.inner) >= 1 << 32:
        return f"{p.pairs} rows of {max(p.hidden, p.inner)} are beyond offsets of 32 bits"
    if _stage(p, tiling).depth(target) < 2:
        return f"{target.name} has {target.shared_bytes} bytes of shared memory, too few"
    if tiling is ASCENDING and p.tokens < FEWEST:
        return f"{p.tokens} tokens; tiles of {tiling.block_m} want {FEWEST}"
    return None


def sort(p: Problem, defines: Defines) -> list[Launch]:
    """Pairs by expert, cut into tiles: (order, tiles, ranks) are the first scratch buffers."""
    order, tiles, ranks = scratch(0, 1, 2)
    tokens = Scalar("i32", p.tokens)
    count, place = (*inputs(1), ranks, tokens), (*inputs(1), ranks, order, tiles, tokens)
    return [
        Launch(symbol, (SORT_BLOCKS, 1, 1), (SORT_THREADS, 1, 1), args, defines=defines, pdl=True)
        for symbol, args in (("moe_count", count), ("moe_sort", place))
    ]


def sort_bytes(p: Problem, block_m: int) -> list[int]:
    """Of the buffers of `sort`; behind the ranks, what each block counts of each expert."""
    ranks = p.pairs + SORT_BLOCKS * p.experts
    return [p.pairs * 4, (1 + most_tiles(p, block_m)) * 16, ranks * 4]


def plan_tiles(attrs: Attrs, specs: Specs, target: Target, tiling: Tiling) -> Plan:
    """count, sort, [quantise], up, down, combine."""
    p = problem(attrs, specs)
    stage = _stage(p, tiling)
    tuning = {"BLOCK_M": tiling.block_m, "DEPTH": stage.depth(target), "QUANT": p.quant}
    defines = macros(p, **tiling.tuning, **tuning, SLACK=stage.slack(target), **SORT)
    order, tiles, h, parts, codes = scratch(0, 1, 3, 4, 5)
    most = most_tiles(p, tiling.block_m)
    given = [operand(p, n, "w2") if p.quant else NULL for n in ("x_scale", "h_scale")]

    def product(symbol: str, rows: Arg, weight: str, rest: tuple[Arg, ...], panels: int) -> Launch:
        blocks = min(target.sms, most * -(-panels // 4))
        args = (rows, order, tiles, *weights(p, weight), *rest)
        return Launch(symbol, (blocks, 1, 1), (THREADS, 1, 1), args, stage.nbytes(target),
                      defines=defines, pdl=True)  # fmt: skip

    launches = sort(p, defines)
    x = inputs(0)[0]
    if p.quant:
        x = codes
        args = (*inputs(0, 1), given[0], codes, NULL)
        launches.append(Launch("quantise_x", (p.pairs, 1, 1), (WARPS * 32, 1, 1), args,
                               defines=defines, pdl=True))  # fmt: skip
    launches += [
        product("tile_up", x, "w13", (*given, h), -(-p.inner // 32)),
        product("tile_down", h, "w2", (given[1], parts), -(-p.hidden // 64)),
        combine(p, 4, defines),
    ]
    sizes = sort_bytes(p, tiling.block_m)
    sizes += [p.pairs * p.inner * 2, p.pairs * p.hidden * tiling.part_bytes]
    if p.quant:
        sizes.append(p.pairs * p.hidden * 2)
    return Plan(tuple(launches), tuple(Scratch(n) for n in sizes))


def seconds(p: Problem, target: Target, rate: float, row_bytes: float) -> float:
    """Reading weights or multiplying at `rate`, whichever is longer, or, on Hopper, both, as
    measured of `wide`; `row_bytes` moved for each pair; launches. Predicted, not measured."""
    columns = 16 * max(1.0, p.pairs / p.hit / 16 + 0.5)  # of an expert: whole groups of sixteen
    multiply = 6 * p.hit * columns * p.hidden * p.inner / rate
    read = 1.2 * p.hit * p.expert_bytes / target.bandwidth
    both = read + multiply if target.wgmma else max(read, multiply)
    return both + p.pairs * row_bytes / target.bandwidth + 20e-6


def cost_tiles(attrs: Attrs, specs: Specs, target: Target, tiling: Tiling) -> float:
    """`seconds` at the rate of mma.sync; the rows are h, parts and what a format quantises."""
    p = problem(attrs, specs)
    rate = target.bf16_flops * (HOPPER_RATE if target.wgmma else OTHER_RATE)
    rows = 2 * tiling.part_bytes * p.hidden + 4 * p.inner + (4 * p.hidden if p.quant else 0)
    return seconds(p, target, rate, rows)


def _tactic(name: str, tiling: Tiling, key: Key | None = None) -> Tactic:
    refusal, plan = partial(refuse_tiles, tiling=tiling), partial(plan_tiles, tiling=tiling)
    cost = partial(cost_tiles, tiling=tiling)
    return Tactic(name, "moe/moe_tiles.cu", refusal, plan, cost, key)


TILES = _tactic("tiles", BY_PARTS, by_parts)
TILES_128 = _tactic("tiles_128", ASCENDING)
