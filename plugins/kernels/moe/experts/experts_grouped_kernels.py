"""The tactic `grouped` of `grouped_moe` (experts_grouped_mma.cu): reads an expert's weights once.

Any number of tokens (in chunks, where their ids exceed shared memory), any format, any target.
"""

from dataclasses import dataclass, replace

from spark_engine.kernel import Launch, Plan, Target
from spark_engine.plugins.formats.weight_packing import padded
from spark_engine.plugins.kernels.moe.experts.experts_problem import (
    MOST_SLABS,
    THREADS,
    WARPS,
    Problem,
    by_parts,
    combine,
    macros,
    operand,
    part_slabs,
    refuse,
    split,
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
    """Whether registers serve two blocks, one of which reads: not where a warp has all of k."""
    codes = p.weights == 2 and _columns(p, target) == 1 and _slabs(p) <= 4
    return target.large_shared and split(p.hidden) > 1 and (codes or p.four_bits and not p.quant)


def _slabs(p: Problem) -> int:
    return max(part_slabs(p.hidden), part_slabs(p.inner))


def refuse_grouped(node: Node) -> str | None:
    """Refuses what `up` and `down` cannot hold, not even for one token."""
    if reason := refuse(node):
        return reason
    p, target = Problem.of(node), node.target
    if (most := _slabs(p)) > MOST_SLABS:
        return f"H = {p.hidden}, I = {p.inner}: {most} k-slabs a warp, more than registers hold"
    if config_of(p, target).tokens == 0:
        return f"{target.name} has {target.shared_bytes} bytes of shared memory, too few"
    return None


def plan_grouped(node: Node) -> Plan:
    """[quantise], up, [quantise], down, combine; for each chunk over the same scratch memory."""
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
    node = node.with_scratch(**_memory(replace(p, tokens=w.tokens)))
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

    def product(symbol: str, x: str, weight: str, given: str, out: str) -> Launch:
        args = f"{x} ids {weights(p, weight)} {operand(p, given, 'w2')} {out} tokens{last}"
        return Kernel(symbol, args).launch(
            node, blocks, THREADS, sizes, shared, tokens=p.tokens, start=start or 0
        )

    def quantise(symbol: str, x: str, given: str, out: str) -> Launch:
        kernel = Kernel(symbol, f"{x} ids {given} {out}{last}")
        return kernel.launch(node, p.pairs, THREADS, sizes, start=start or 0)

    up, down = ("xq", "raw") if p.form.static else ("x", "h")
    launches = [
        product("moe_up", up, "w13", "x_scale", down),
        product("moe_down", "h", "w2", "h_scale", "parts"),
        combine(node, p, sizes, start),
    ]
    if p.form.static:
        launches.insert(0, quantise("quantise_x", "x", "x_scale", "xq"))
        launches.insert(2, quantise("quantise_h", "raw", "h_scale", "h"))
    return launches


def _memory(p: Problem) -> dict[str, int]:
    """Scratch memory of one chunk. Without static scales h is quantised where it is loaded."""
    h = {"h": p.pairs * p.inner * (4 if p.quant and not p.form.static else 2)}
    if p.form.static:
        h |= {"xq": p.pairs * p.hidden * 2, "raw": p.pairs * p.inner * 4}
    return h | {"parts": p.pairs * p.hidden * 4}


def cost_grouped(node: Node) -> float:
    """Experts hit, read once for every so many tokens; three launches. Fitted to measurements."""
    p = Problem.of(node)
    w = config_of(p, node.target)
    return sum(_cost(replace(p, tokens=n), w, node.target) for _, n in chunks_of(p, w))


def _cost(p: Problem, w: GroupedConfig, target: Target) -> float:
    blocks = max(p.hit, p.pairs / (8 * w.columns) + p.hit / 2)
    return (1.12 if w.columns == 1 else 2.7) * blocks * p.expert_bytes / target.bandwidth + 9e-6


GROUPED = Candidate("grouped", "moe/experts/experts_grouped_mma.cu",
                    plan_grouped, cost_grouped, refuse_grouped, by_parts)  # fmt: skip
