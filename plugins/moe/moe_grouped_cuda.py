"""The tactic `grouped` of `grouped_moe` (moe_grouped.cu): reads the weights of an expert once.

Any number of tokens (in chunks, where their ids exceed shared memory), any format, any target.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from spark_engine.kernel import Arg, Attrs, Launch, Plan, Scalar, Scratch, Specs, Tactic, Target
from spark_engine.plugins.common.weight_packing import padded
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

STATIC = 8192  # bytes of shared memory kept for what the kernels declare themselves
SHALLOW = 2  # stages of a ring that makes room for more ids


@dataclass(frozen=True)
class GroupedConfig:
    """How a node is cut into work.

    Attributes:
        columns: n8 tiles of tokens that a block of work has.
        depth: stages of a warp's ring.
        tokens: of a chunk; the last may have fewer.
    """

    columns: int
    depth: int
    tokens: int


def config_of(p: Problem, target: Target) -> GroupedConfig:
    """The fewest chunks: the deepest ring where one will do, else a shallow one.

    A weight is read once for every chunk and 8 · `columns` pairs of its expert, so that a large
    chunk saves more than a deep ring. `tokens` is 0 where not even one token fits.
    """
    columns, deep = _columns(p), _depth(p, target)
    most = 0
    for depth in (deep, min(deep, SHALLOW)):
        left = target.shared_bytes - STATIC - fixed_bytes(p, columns, depth)
        most = max(0, left // 16 * 16 // (2 * p.chosen))
        if most >= p.tokens:
            return GroupedConfig(columns, depth, p.tokens)
    chunks = -(-p.tokens // max(most, 1))
    return GroupedConfig(columns, depth, min(most, -(-p.tokens // chunks)))


def chunks_of(p: Problem, w: GroupedConfig) -> tuple[tuple[int, int], ...]:
    """(first token, tokens) of each chunk."""
    return tuple((i, min(w.tokens, p.tokens - i)) for i in range(0, p.tokens, w.tokens))


def _columns(p: Problem) -> int:
    return 1 if p.tokens <= 128 or p.weights != 1 or p.quant else 2


def _depth(p: Problem, target: Target) -> int:
    if p.weights == 1:
        return 4 if target.large_shared else 3
    return (2 if target.large_shared else 1) * (1 if p.weights == 0 else 2)


def _buffers(p: Problem, columns: int) -> int:
    return 2 if columns == 1 and p.weights == 1 and not p.quant else 1


def fixed_bytes(p: Problem, columns: int, depth: int) -> int:
    """Bytes of shared memory beside the ids: rings and partial sums."""
    ring = WARPS * depth * 4 * M16_BYTES[p.weights]
    return ring + _buffers(p, columns) * WARPS * 4 * columns * 512


def _shared(p: Problem, w: GroupedConfig) -> int:
    return fixed_bytes(p, w.columns, w.depth) + padded(2 * w.tokens * p.chosen, 16)


def _resident(p: Problem, target: Target, shared: int) -> int:
    small = 2 * (shared + 4096) < 230_000
    return 2 if target.large_shared and p.kind == "nvfp4" and small else 1


def refuse_grouped(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """Refuses what `up` and `down` cannot hold, not even for one token."""
    reason = refuse(attrs, specs)
    if reason:
        return reason
    p = problem(attrs, specs)
    if config_of(p, target).tokens == 0:
        return f"{target.name} has {target.shared_bytes} bytes of shared memory, too few"
    return None


def plan_grouped(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    """[quantise], up, [quantise], down, combine; for each chunk over the same scratch memory."""
    p = problem(attrs, specs)
    w = config_of(p, target)
    resident = _resident(p, target, _shared(p, w))
    tuning = {
        "NT": w.columns,
        "DEPTH": w.depth,
        "BUFFERS": _buffers(p, w.columns),
        "RESIDENT": resident,
        "QUANT": p.quant,
    }
    chunks = chunks_of(p, w)
    if len(chunks) == 1:
        launches = _launches(p, w, target.sms * resident, macros(p, **tuning), ())
    else:
        defines = macros(p, **tuning, CHUNKED=1)
        launches = ()
        for first, tokens in chunks:
            part, start = replace(p, tokens=tokens), (Scalar("i32", first),)
            launches += _launches(part, w, target.sms * resident, defines, start)
    return Plan(launches, _buffers_of(replace(p, tokens=w.tokens)))


def _launches(
    p: Problem, w: GroupedConfig, blocks: int, defines: Defines, start: tuple[Arg, ...]
) -> tuple[Launch, ...]:
    """Those of one chunk; `start`: its first token, where there are several."""
    block, shared, tokens = (THREADS, 1, 1), _shared(p, w), Scalar("i32", p.tokens)

    def product(symbol: str, x: Arg, weight: str, given: str, scales: Arg, out: Arg) -> Launch:
        scale = operand(p, given, weight)
        args = (x, *inputs(1), *weights(p, weight), scale, scales, out, tokens, *start)
        return Launch(symbol, (blocks, 1, 1), block, args, shared, defines=defines, pdl=True)

    def quantise(symbol: str, count: int, x: Arg, given: str, out: tuple[Arg, ...]) -> Launch:
        args = (x, *inputs(1), operand(p, given, "w2"), *out, *start)
        return Launch(symbol, (count, 1, 1), block, args, defines=defines, pdl=True)

    x, (h, parts) = inputs(0)[0], scratch(0, 1)
    if not p.quant:
        return (
            product("moe_up", x, "w13", "", h, h),
            product("moe_down", h, "w2", "", h, parts),
            combine(p, 1, defines, start),
        )
    xq, xs, raw, hs = scratch(2, 3, 4, 5)
    return (
        quantise("quantise_x", _quantised_rows(p), x, "x_scale", (xq, xs)),
        product("moe_up", xq, "w13", "x_scale", xs, raw),
        quantise("quantise_h", p.pairs, raw, "h_scale", (h, hs)),
        product("moe_down", h, "w2", "h_scale", hs, parts),
        combine(p, 1, defines, start),
    )


def _quantised_rows(p: Problem) -> int:
    """Rows of quantised x: one a token where every expert rounds alike."""
    return p.tokens if p.kind == "fp8_block" else p.pairs


def _buffers_of(p: Problem) -> tuple[Scratch, ...]:
    """Scratch memory of one chunk."""
    rows, across = _quantised_rows(p), (-(-p.hidden // 128), -(-p.inner // 128))
    sizes = [p.pairs * p.inner * 2, p.pairs * p.hidden * 4]
    if p.quant:
        sizes += [rows * p.hidden * 2, rows * across[0] * 4]
        sizes += [p.pairs * p.inner * 4, p.pairs * across[1] * 4]
    return tuple(Scratch(n) for n in sizes)


def cost_grouped(attrs: Attrs, specs: Specs, target: Target) -> float:
    """Experts hit, read once for every so many tokens; three launches. Fitted to measurements."""
    p = problem(attrs, specs)
    w = config_of(p, target)
    return sum(_cost(replace(p, tokens=n), w, target) for _, n in chunks_of(p, w))


def _cost(p: Problem, w: GroupedConfig, target: Target) -> float:
    blocks = max(p.hit, p.pairs / (8 * w.columns) + p.hit / 2)
    return (1.12 if w.columns == 1 else 2.7) * blocks * p.expert_bytes / target.bandwidth + 9e-6


GROUPED = Tactic(
    "grouped", "moe/moe_grouped.cu", refuse_grouped, plan_grouped, cost_grouped, by_parts
)
