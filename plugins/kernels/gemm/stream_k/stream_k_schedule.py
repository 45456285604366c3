"""How stream-K cuts k among blocks, its reduction key, and its two tactics.

Stream-K lays the k-slabs of all tiles on one line and cuts it into equal pieces, a block each. With
one tile along m (BLOCK_M tokens or fewer) the cuts fall on the same k whatever m is, so a token's
result is the same to the bit in every bucket. With several tiles along m the cuts of a tile depend
on its place in the batch: no reduction key. The data-parallel schedule sums k of whole tiles in
ascending order for any m: a block for each tile, or, of many large tiles, blocks that take one
after another, so that a tile is fetched while the last one is written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from spark_engine.kernel import Plan, Scalar, Scratch
from spark_engine.plugins.kernels.gemm.stream_k import stream_k_gemm as sg
from spark_engine.plugins.launch import Candidate, Node

WHOLE = "ascending k"
MOST = 1 << 32  # the kernels compute positions on the line in 32 bits


@dataclass(frozen=True)
class Line:
    """The line of a launch, read off its macros and arguments."""

    tiles: int
    m_tiles: int  # tiles along m, which share weights
    blocks: int
    cut: int  # k-slabs between cuts
    block_n: int  # weight rows of a tile
    k: int

    @classmethod
    def of(cls, plan: Plan) -> Line:
        """Of the plan's one launch."""
        (launch,) = plan.launches
        numbers = (a for a in launch.args if isinstance(a, Scalar) and a.kind == "i32")
        m, n, k = (int(a.value) for a in numbers)
        macros = {name: int(value) for name, value in launch.defines}
        m_tiles, block_n = -(-m // macros["BLOCK_M"]), macros["BLOCK_N"]
        tiles = -(-n // block_n) * m_tiles
        return cls(tiles, m_tiles, launch.grid[0], macros["CUT"], block_n, k)

    @property
    def too_long(self) -> bool:
        """With a block a tile 32-bit products may overflow (a k-slab is 64 k or more)."""
        return self.tiles * -(-self.k // (64 * self.cut)) * (self.tiles + 1) >= MOST


def reduction_key(plan: Plan) -> str | None:
    """The key of the reduction order of a launch (`Tactic.reduction`)."""
    line = Line.of(plan)
    if line.blocks == line.tiles:
        return WHOLE
    if line.m_tiles > 1:
        return None
    return f"{line.blocks} pieces, cut every {line.cut} k-slabs, tiles of {line.block_n}"


def streaming(
    form: sg.StreamKForm,
    refuse: Callable[[Node], str | None],
    cost: Callable[[Node], float],
    exact: bool = False,
) -> tuple[Candidate, Candidate]:
    """Stream-K with its reduction key, and the data-parallel schedule of whole tiles: no fix-up.

    `exact`: f32 results go without wgmma.
    """

    def plan(node: Node) -> Plan:
        p = sg.Problem.of(node, form)
        whole = exact and node.text("dtype") == "f32"
        return sg.plan(node, sg.choose(p, form, node.target, whole), p, form)

    def large(node: Node) -> Plan | None:
        """The same in large tiles, whole, where they suit."""
        if exact and node.text("dtype") == "f32":
            return None
        return sg.plan_large(node, sg.Problem.of(node, form), form)

    def refuse_whole(node: Node) -> str | None:
        if reason := refuse(node):
            return reason
        line = Line.of(plan(node))
        if line.tiles == line.blocks:
            return "no tile is cut in any case"
        if line.too_long and large(node) is None:  # bands count tiles alone
            return f"{line.tiles} tiles are more than are counted"
        return None

    def plan_whole(node: Node) -> Plan:
        if many := large(node):
            return many
        made = plan(node)
        (launch,) = made.launches
        grid = (Line.of(made).tiles, 1, 1)
        partial = Scratch(256)  # never used: there are no partial sums
        return Plan((replace(launch, grid=grid, resident=False),), (partial, *made.scratch[1:]))

    def cost_whole(node: Node) -> float:
        """Whole rounds of blocks; of tiles in bands they take less time in all."""
        many, sms = large(node), node.target.sms
        tiles = Line.of(many or plan(node)).tiles
        rounds = -(-tiles // sms) * sms / tiles
        return cost(node) * max(1.02, rounds) * (0.9 if many else 1.0)

    def reduction(node: Node) -> str | None:
        return reduction_key(plan(node))

    return (
        Candidate(
            "stream-k", form.source, plan, cost, refuse, reduction, recorded=sg.Problem.recorded
        ),
        Candidate(
            "whole tiles",
            form.source,
            plan_whole,
            cost_whole,
            refuse_whole,
            lambda node: WHOLE,
            recorded=sg.Problem.recorded,
        ),
    )
