"""The CUDA side of `grouped_moe`: tactics for few, for more and for many tokens.

Knows how the kernels' work is cut; how operands are packed is moe_packs'. Knows no model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from spark_engine.kernel import (
    Arg,
    Attrs,
    Cuda,
    Launch,
    Plan,
    Pointer,
    Scalar,
    Scratch,
    Specs,
    Tactic,
    Target,
)
from spark_engine.plugins import expert_tiles as et
from spark_engine.plugins import moe_packs
from spark_engine.tensors import DType

WARPS = 8
THREADS = WARPS * 32
FEW = 4  # tokens that run pair by pair
TILE = 64  # tokens of a tile of the wide kernels, which have no other width
SORT_CLUSTER = 8  # blocks that sort
WIDE_STATIC = 5120  # bytes of shared memory that the wide kernels take beside their ring

# WEIGHTS of moe_common.cuh and QUANT of moe_quantise.cuh.
_WEIGHTS = {"dense": 0, "nvfp4": 1, "nvfp4_a4": 1, "fp8": 2, "fp8_block": 2}
_QUANT = {"dense": 0, "nvfp4": 0, "fp8": 1, "fp8_block": 2, "nvfp4_a4": 3}
_STRIP = (2048, 512 + 64, 1024)  # bytes of 16 rows of a unit with their block scales
_BYTES = (2.0, 0.5625, 1.0)  # of a weight


@dataclass(frozen=True)
class Problem:
    """The sizes of one node."""

    kind: str
    tokens: int
    chosen: int  # experts a token, the shared one included
    experts: int
    hidden: int
    inner: int

    @property
    def pairs(self) -> int:
        return self.tokens * self.chosen

    @property
    def weights(self) -> int:
        return _WEIGHTS[self.kind]

    @property
    def quant(self) -> int:
        return _QUANT[self.kind]

    @property
    def expert_bytes(self) -> float:
        """Weights of one expert."""
        return 3 * self.hidden * self.inner * _BYTES[self.weights]

    @property
    def hit(self) -> float:
        """Experts that uniform routing hits."""
        return self.experts * (1 - (1 - self.chosen / self.experts) ** self.tokens)


def problem(attrs: Attrs, specs: Specs) -> Problem:
    """The sizes, from packed specs. Where nothing tells I, it counts with its padding of zeros."""
    kind = str(attrs["format"])
    x, ids = specs[:2]
    two = {"dense": "w13", "fp8_block": "w13", "fp8": "w13_scale"}.get(kind, "w13_scale2")
    experts, width = specs[moe_packs.index(kind, two)].dims[:2]
    return Problem(kind, x.dims[0], ids.dims[1], experts, x.dims[1], width // 2)


def split(k: int) -> int:
    """Warps that share a dot product of k: two units each where there are as many."""
    units = -(-k // 64)
    ways = math.gcd(units, WARPS)
    return ways // 2 if ways > 1 and units == ways else ways


# ---- refusing ----------------------------------------------------------------------------------


def _refuse(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    kind = str(attrs["format"])
    if specs[0].dtype is not DType.BF16 or attrs["dtype"] != "bf16":
        return f"x is {specs[0].dtype} and dtype {attrs['dtype']}; only bf16 is served"
    w13, w2 = (specs[moe_packs.index(kind, name)] for name in ("w13", "w2"))
    if kind == "dense" and not w13.dtype is w2.dtype is DType.BF16:
        return f"w13 is {w13.dtype}; only bf16 experts are served: cast them when lowering"
    p = problem(attrs, specs)
    if p.hidden % 16 or p.inner % 16:
        return f"H = {p.hidden} and I = {p.inner}; both must be multiples of 16"
    if p.weights != 1 and (w13.dims[2], w2.dims[2]) != (
        et.padded(p.hidden, et.UNIT),
        et.padded(p.inner, et.UNIT),
    ):
        return f"H = {p.hidden} and I; both must be multiples of 16"
    if kind == "fp8_block" and p.inner % 128:
        return f"I = {p.inner}; in blocks of 128 it must be a multiple of 128"
    for k in (p.hidden, p.inner):
        if -(-k // 64) // split(k) > 4:
            return f"a row of {k} weights is more than the fragments that fit in registers"
    return None


def refuse_grouped(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """Refuses what `up` and `down` cannot hold."""
    reason = _refuse(attrs, specs, target)
    if reason:
        return reason
    p = problem(attrs, specs)
    need = _shared(p, target, _columns(p))
    if need + 8192 > target.shared_bytes:
        return f"{p.tokens} tokens need {need} bytes of shared memory; split the launch"
    return None


def refuse_each(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """Refuses more than a few tokens."""
    reason = _refuse(attrs, specs, target)
    if reason:
        return reason
    p = problem(attrs, specs)
    if p.tokens > FEW or p.kind != "nvfp4":
        return f"{p.tokens} tokens of format {p.kind}; up to {FEW} of nvfp4 are served"
    turns = -(-p.chosen // (WARPS // split(p.inner))) * (-(-p.inner // 64) // split(p.inner))
    if turns > 10:
        return f"{p.chosen} experts a token of {p.inner} do not fit in registers"
    return None


def refuse_wide(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """Refuses what has no wgmma, and activations that are quantised."""
    reason = _refuse(attrs, specs, target)
    if reason:
        return reason
    if not target.hopper:
        return f"{target.name} has no wgmma"
    p = problem(attrs, specs)
    if p.quant:
        return f"format {p.kind} quantises activations; the wide kernels take them as they are"
    return None


# ---- few tokens ----------------------------------------------------------------------------------


def _columns(p: Problem) -> int:
    """Columns of 8 tokens that a block of work has."""
    return 1 if p.tokens <= 128 or p.weights != 1 or p.quant else 2


def _depth(p: Problem, target: Target) -> int:
    if p.weights == 1:
        return 4 if target.hopper else 3
    return (2 if target.hopper else 1) * (1 if p.weights == 0 else 2)


def _buffers(p: Problem, nt: int) -> int:
    return 2 if nt == 1 and p.weights == 1 and not p.quant else 1


def _resident(p: Problem, target: Target, nt: int) -> int:
    small = 2 * (_shared(p, target, nt) + 4096) < 230_000
    return 2 if target.hopper and p.kind == "nvfp4" and small else 1


def _shared(p: Problem, target: Target, nt: int) -> int:
    parts = WARPS * 4 * nt * 512
    ring = WARPS * _depth(p, target) * 4 * _STRIP[p.weights]
    return ring + _buffers(p, nt) * parts + et.padded(2 * p.pairs, 16)


Defines = tuple[tuple[str, str], ...]


def _sizes(p: Problem) -> dict[str, int]:
    return {
        "HIDDEN": p.hidden,
        "INNER": p.inner,
        "EXPERTS": p.experts,
        "K1": p.chosen,
        "UP_WK": split(p.hidden),
        "DOWN_WK": split(p.inner),
        "WEIGHTS": p.weights,
    }


def _texts(sizes: dict[str, int]) -> Defines:
    return tuple((name, str(value)) for name, value in sizes.items())


def _input(*indices: int) -> tuple[Arg, ...]:
    return tuple(Pointer("input", i) for i in indices)


def _scratch(*indices: int) -> tuple[Arg, ...]:
    return tuple(Pointer("scratch", i) for i in indices)


def _operand(p: Problem, name: str, instead: str) -> Arg:
    """The pointer of an operand; of another that is never read where the format lacks it."""
    known = moe_packs.OPERANDS[p.kind]
    return Pointer("input", moe_packs.index(p.kind, name if name in known else instead))


def _weights(p: Problem, name: str) -> tuple[Arg, ...]:
    """A weight, its block scales and the scales of its rows."""
    rows = f"{name}_scale2" if p.weights == 1 else f"{name}_scale"
    return tuple(_operand(p, n, name) for n in (name, f"{name}_scale", rows))


def _combine(p: Problem, parts: int, defines: Defines) -> Launch:
    threads = min(256, max(32, et.padded(p.hidden // 4, 32)))
    args = (*_input(1, 2), *_scratch(parts), Pointer("output", 0))
    return Launch("moe_combine", (p.tokens, 1, 1), (threads, 1, 1), args, defines=defines,
                  overlaps=True)  # fmt: skip


def plan_grouped(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    """[quantise], up, [quantise], down, combine."""
    p = problem(attrs, specs)
    nt = _columns(p)
    tuning = {
        "NT": nt,
        "DEPTH": _depth(p, target),
        "BUFFERS": _buffers(p, nt),
        "RESIDENT": _resident(p, target, nt),
        "QUANT": p.quant,
    }
    defines, shared = _texts(_sizes(p) | tuning), _shared(p, target, nt)
    grid, block = (target.sms * _resident(p, target, nt), 1, 1), (THREADS, 1, 1)
    tokens = Scalar("i32", p.tokens)
    rows = p.tokens if p.kind == "fp8_block" else p.pairs  # of quantised x

    def product(symbol: str, x: Arg, weight: str, given: str, blocks: Arg, out: Arg) -> Launch:
        scale = _operand(p, given, weight)
        args = (x, *_input(1), *_weights(p, weight), scale, blocks, out, tokens)
        return Launch(symbol, grid, block, args, shared, defines=defines, overlaps=True)

    def quantise(symbol: str, count: int, x: Arg, given: str, out: tuple[Arg, ...]) -> Launch:
        args = (x, *_input(1), _operand(p, given, "w2"), *out)
        return Launch(symbol, (count, 1, 1), block, args, defines=defines, overlaps=True)

    x, (h, parts) = _input(0)[0], _scratch(0, 1)
    scratch = [Scratch(p.pairs * p.inner * 2), Scratch(p.pairs * p.hidden * 4)]
    if not p.quant:
        up = product("moe_up", x, "w13", "", h, h)
        down = product("moe_down", h, "w2", "", h, parts)
        return Plan((up, down, _combine(p, 1, defines)), tuple(scratch))
    xq, xs, raw, hs = _scratch(2, 3, 4, 5)
    scratch += [Scratch(rows * p.hidden * 2), Scratch(rows * -(-p.hidden // 128) * 4)]
    scratch += [Scratch(p.pairs * p.inner * 4), Scratch(p.pairs * -(-p.inner // 128) * 4)]
    launches = (
        quantise("quantise_x", rows, x, "x_scale", (xq, xs)),
        product("moe_up", xq, "w13", "x_scale", xs, raw),
        quantise("quantise_h", p.pairs, raw, "h_scale", (h, hs)),
        product("moe_down", h, "w2", "h_scale", hs, parts),
        _combine(p, 1, defines),
    )
    return Plan(launches, tuple(scratch))


def plan_each(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    """each_up, each_down."""
    p = problem(attrs, specs)
    defines = _texts(_sizes(p))
    groups = et.padded(p.inner, 32) // 32
    steps = -(-groups // (WARPS // split(p.hidden)))
    up = Launch("each_up", (2 * steps, p.pairs, 1), (THREADS, 1, 1),
                (*_input(0, 1), *_weights(p, "w13"), *_scratch(0)), defines=defines,
                overlaps=True)  # fmt: skip
    down = Launch("each_down", (-(-p.hidden // 16), p.tokens, 1), (THREADS, 1, 1),
                  (*_scratch(0), *_input(1, 2), *_weights(p, "w2"), Pointer("output", 0)),
                  defines=defines, overlaps=True)  # fmt: skip
    return Plan((up, down), (Scratch(p.pairs * p.inner * 2),))


# ---- many tokens ---------------------------------------------------------------------------------


def most_tiles(p: Problem) -> int:
    """Tiles that the worst routing makes."""
    return p.pairs // TILE + min(p.experts, p.pairs)


def plan_wide(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    """sort, up, down, combine."""
    p = problem(attrs, specs)
    parts_of = [-(-k // et.UNIT) // split(k) for k in (p.hidden, p.inner)]  # units of a part
    span = 1 if any(n % 2 for n in parts_of) else 2  # units of a stage
    stage = span * (TILE * 128 + 16 * _STRIP[p.weights])
    depth = min(12, (target.shared_bytes - WIDE_STATIC) // stage)
    defines = _texts(_sizes(p) | {"TILE": TILE, "DEPTH": depth})
    x, order, tiles, h, parts, ranks = _scratch(0, 1, 2, 3, 4, 5)
    units = [-(-k // et.UNIT) for k in (p.hidden, p.inner)]
    rest = -(-p.tokens * units[0] * 2 // 1024)  # blocks that could reorder x
    clusters = max(2, min(target.sms, SORT_CLUSTER + rest) // SORT_CLUSTER)
    sort = Launch("moe_sort", (clusters * SORT_CLUSTER, 1, 1), (1024, 1, 1),
                  (*_input(0, 1), x, ranks, order, tiles, Scalar("i32", p.tokens)),
                  cluster=(SORT_CLUSTER, 1, 1), defines=defines, overlaps=True)  # fmt: skip

    def product(symbol: str, rows: Arg, weight: str, out: Arg, groups: int) -> Launch:
        blocks = min(target.sms, most_tiles(p) * -(-groups // 4))
        args = (rows, order, tiles, *_weights(p, weight), out)
        return Launch(symbol, (blocks, 1, 1), (640, 1, 1), args, depth * stage, defines=defines,
                      overlaps=True)  # fmt: skip

    launches = (
        sort,
        product("wide_up", x, "w13", h, -(-p.inner // 32)),
        product("wide_down", h, "w2", parts, -(-p.hidden // 64)),
        _combine(p, 4, defines),
    )
    sizes = (
        p.tokens * units[0] * 128,
        p.pairs * 4,
        (1 + most_tiles(p)) * 16,
        p.pairs * units[1] * 128,
        p.pairs * p.hidden * 4,
        p.pairs * 4,
    )
    return Plan(launches, tuple(Scratch(n) for n in sizes))


# ---- costs ---------------------------------------------------------------------------------------


def cost_grouped(attrs: Attrs, specs: Specs, target: Target) -> float:
    """Experts hit, read once for every so many tokens; three launches. Fitted to measurements."""
    p = problem(attrs, specs)
    columns = _columns(p)
    blocks = max(p.hit, p.pairs / (8 * columns) + p.hit / 2)
    return (1.42 if columns == 1 else 2.7) * blocks * p.expert_bytes / target.bandwidth + 9e-6


def cost_each(attrs: Attrs, specs: Specs, target: Target) -> float:
    """Every pair's expert, read again where it is shared, and two launches."""
    p = problem(attrs, specs)
    return 1.15 * p.pairs * p.expert_bytes / target.bandwidth + 4e-6


def cost_wide(attrs: Attrs, specs: Specs, target: Target) -> float:
    """Bytes and mathematics; rows written and added; four launches. Fitted to measurements."""
    p = problem(attrs, specs)
    read = 1.5 * p.hit * p.expert_bytes / target.bandwidth
    multiply = 1.8 * 6 * p.pairs * p.hidden * p.inner / target.bf16_flops
    return read + multiply + 4 * p.pairs * p.hidden / target.bandwidth + 15e-6


CUDA = Cuda(
    tactics=(
        Tactic("each", "moe_each.cu", refuse_each, plan_each, cost_each),
        Tactic("grouped", "grouped_moe.cu", refuse_grouped, plan_grouped, cost_grouped),
        Tactic("wide", "moe_wide.cu", refuse_wide, plan_wide, cost_wide),
    ),
    packs=moe_packs.PACKS,
)
