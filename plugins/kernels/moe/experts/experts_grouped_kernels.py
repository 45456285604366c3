"""The tactic `grouped` of `grouped_moe` (experts_grouped_mma.cu): reads an expert's weights once.

Any number of tokens (in chunks, where their ids exceed shared memory), any format, any target.
"""

from dataclasses import dataclass, replace

from spark_engine.kernel import Launch, Plan, Scratch, Target
from spark_engine.plugins.formats.weight_packing import padded
from spark_engine.plugins.kernels.moe.experts.experts_problem import (
    MOST_SLABS,
    THREADS,
    WARPS,
    Problem,
    by_parts,
    combine,
    macros,
    part_slabs,
    refuse,
    weights,
)
from spark_engine.plugins.launch import Candidate, Kernel, Macros, Node

STATIC = 8192  # bytes of shared memory kept for what the kernels declare themselves
SHALLOW = 2  # stages of a ring that leaves space for more ids


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
    columns, deep = _columns(p, target), _depth(p, target)
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


def _columns(p: Problem, target: Target) -> int:
    if p.tokens <= 128 or _slabs(p) > 4:
        return 1
    two = p.four_bits and not p.quant or p.kind == "fp8_block" and target.large_shared
    return 2 if two else 1


def _depth(p: Problem, target: Target) -> int:
    if not target.large_shared:
        return 3 if p.four_bits else 1 if p.weights == 0 else 2
    return 2 if p.weights == 0 or p.weights == 2 and _paired(p, target) else 4


def _buffers(p: Problem, columns: int) -> int:
    return 2 if columns == 1 and p.four_bits and not p.quant else 1


def fixed_bytes(p: Problem, columns: int, depth: int) -> int:
    """Bytes of shared memory in addition to the ids: rings and partial sums."""
    ring = WARPS * depth * 4 * p.m16_bytes
    return ring + _buffers(p, columns) * WARPS * 4 * columns * 512


def _shared(p: Problem, w: GroupedConfig) -> int:
    return fixed_bytes(p, w.columns, w.depth) + padded(2 * w.tokens * p.chosen, 16)


def _resident(p: Problem, target: Target, shared: int) -> int:
    return 2 if _paired(p, target) and 2 * (shared + 4096) < 230_000 else 1


def _paired(p: Problem, target: Target) -> bool:
    """Whether registers serve two blocks of a multiprocessor: one reads while the other adds."""
    codes = p.weights == 2 and _columns(p, target) == 1 and _slabs(p) <= 4
    many = p.weights == 3 and _slabs(p) > 6  # spilled
    return target.large_shared and (codes or p.four_bits and not p.quant and not many)


def _slabs(p: Problem) -> int:
    return max(part_slabs(p.hidden), part_slabs(p.inner))


def refuse_grouped(node: Node) -> str | None:
    """Refuses what `up` and `down` cannot hold, not even for one token."""
    if reason := refuse(node):
        return reason
    p, target = Problem.of(node), node.target
    if p.kind == "nvfp4_a8":
        return "format nvfp4_a8 is multiplied in tiles alone"
    if (most := _slabs(p)) > MOST_SLABS:
        return f"H = {p.hidden}, I = {p.inner}: {most} k-slabs a warp, more than registers hold"
    if config_of(p, target).tokens == 0:
        return f"{target.name} has {target.shared_bytes} bytes of shared memory, too few"
    return None


def plan_grouped(node: Node) -> Plan:
    """Both products in one launch, combine; with static scales [quantise], up, [quantise], down,
    combine. For each chunk over the same scratch memory."""
    p, target = Problem.of(node), node.target
    w = config_of(p, target)
    resident = _resident(p, target, _shared(p, w))
    tuning = {
        "NT": w.columns,
        "DEPTH": w.depth,
        "BUFFERS": _buffers(p, w.columns),
        "RESIDENT": resident,
        "QUANT": p.quant,
    }
    chunks, blocks = chunks_of(p, w), target.sms * resident
    node = node.with_scratch(**_memory(replace(p, tokens=w.tokens), w.columns))
    if len(chunks) == 1:
        return node.plan(*_launches(node, p, w, blocks, macros(p, **tuning)))
    sizes = macros(p, **tuning, CHUNKED=1)
    each = (_launches(node, replace(p, tokens=n), w, blocks, sizes, i) for i, n in chunks)
    return node.plan(*(launch for launches in each for launch in launches))


def _launches(
    node: Node, p: Problem, w: GroupedConfig, blocks: int, sizes: Macros, start: int | None = None
) -> list[Launch]:
    """Those of one chunk; `start`: its first token, where there are several."""
    shared, last = _shared(p, w), "" if start is None else " start"
    values = {"tokens": p.tokens, "start": start or 0}
    w13, w2 = weights(p, "w13"), weights(p, "w2")

    def product(symbol: str, args: str) -> Launch:
        kernel, waits = Kernel(symbol, f"{args} tokens{last}"), symbol == "moe_experts"
        return kernel.launch(node, blocks, THREADS, sizes, shared, resident=waits, **values)

    def quantise(symbol: str, x: str, given: str, out: str) -> Launch:
        kernel = Kernel(symbol, f"{x} ids {given} {out}{last}")
        return kernel.launch(node, p.pairs, THREADS, sizes, start=start or 0)

    sums = combine(node, p, sizes, start)
    if not p.form.static:
        return [product("moe_experts", f"x ids {w13} {w2} h parts counters"), sums]
    return [
        quantise("quantise_x", "x", "x_scale", "xq"),
        product("moe_up", f"xq ids {w13} x_scale raw"),
        quantise("quantise_h", "raw", "h_scale", "h"),
        product("moe_down", f"h ids {w2} h_scale parts"),
        sums,
    ]


def _memory(p: Problem, columns: int) -> dict[str, int | Scratch]:
    """Scratch memory of one chunk. Without static scales h is quantised where it is loaded."""
    h, parts = p.pairs * p.inner, p.pairs * p.hidden * 4
    if p.form.static:
        return {"h": h * 2, "xq": p.pairs * p.hidden * 2, "raw": h * 4, "parts": parts}
    blocks = min(p.pairs, p.experts + p.pairs // (8 * columns))  # of work
    counters = Scratch(8 * blocks, zeroed=True)
    return {"h": h * (4 if p.quant else 2), "parts": parts, "counters": counters}


def cost_grouped(node: Node) -> float:
    """Experts hit, read once for every so many tokens, and launches at 3 us. Fitted to measurements
    of a launch a product; that both products' one launch saves 3 us is an estimate."""
    p = Problem.of(node)
    w = config_of(p, node.target)
    return sum(_cost(replace(p, tokens=n), w, node.target) for _, n in chunks_of(p, w))


def _cost(p: Problem, w: GroupedConfig, target: Target) -> float:
    blocks = max(p.hit, p.pairs / (8 * w.columns) + p.hit / 2)
    read = (1.12 if w.columns == 1 else 2.7) * blocks * p.expert_bytes / target.bandwidth
    return read + (9e-6 if p.form.static else 6e-6)


GROUPED = Candidate("grouped", "moe/experts/experts_grouped_mma.cu",
                    plan_grouped, cost_grouped, refuse_grouped, by_parts)  # fmt: skip
