"""How stream-K cuts k among blocks, its reduction key, and the tactic of whole tiles.

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

from spark_engine.kernel import Attrs, Plan, Scalar, Scratch, Specs, Tactic, Target

WHOLE = "ascending k"
MOST = 1 << 32  # the kernels compute positions on the line in 32 bits
Large = Callable[[Attrs, Specs, Target], Plan | None]


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
        m, n, k = (int(a.value) for a in launch.args if isinstance(a, Scalar))
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


def whole(stream: Tactic, large: Large) -> Tactic:
    """The data-parallel tactic: no fix-up. `large`: its plan in large tiles, where they suit."""

    def refuse(attrs: Attrs, specs: Specs, target: Target) -> str | None:
        reason = stream.refuse(attrs, specs, target)
        if reason is not None:
            return reason
        line = Line.of(stream.plan(attrs, specs, target))
        if line.tiles == line.blocks:
            return "no tile is cut in any case"
        if line.too_long and large(attrs, specs, target) is None:  # bands count tiles alone
            return f"{line.tiles} tiles are more than are counted"
        return None

    def plan(attrs: Attrs, specs: Specs, target: Target) -> Plan:
        many = large(attrs, specs, target)
        if many is not None:
            return many
        made = stream.plan(attrs, specs, target)
        (launch,) = made.launches
        tiles = Line.of(made).tiles
        partial = Scratch(256)  # never used: there are no partial sums
        return Plan(
            (replace(launch, grid=(tiles, 1, 1), resident=False),), (partial, *made.scratch[1:])
        )

    def cost(attrs: Attrs, specs: Specs, target: Target) -> float:
        """Whole rounds of blocks; of tiles in bands they take less time in all."""
        many = large(attrs, specs, target)
        tiles = Line.of(many or stream.plan(attrs, specs, target)).tiles
        rounds = -(-tiles // target.sms) * target.sms / tiles
        return stream.cost(attrs, specs, target) * max(1.02, rounds) * (0.9 if many else 1.0)

    return Tactic("whole tiles", stream.source, refuse, plan, cost, lambda a, s, t: WHOLE)


def streaming(stream: Tactic, large: Large) -> tuple[Tactic, Tactic]:
    """The tactic with its reduction key, and the data-parallel one of whole tiles."""

    def reduction(attrs: Attrs, specs: Specs, target: Target) -> str | None:
        return reduction_key(stream.plan(attrs, specs, target))

    return replace(stream, reduction=reduction), whole(stream, large)
