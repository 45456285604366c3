"""In which order the streaming linear kernels sum k, and the tactic that always sums in one.

A launch cuts the line of all tiles into equal pieces. Within one tile of batch the pieces fall on
the same k whatever the rows, so rows up to a tile's have the same bits in every bucket. With
several tiles of batch the cut depends on which of them a row is in; a block for each whole tile
sums all of k in ascending order, for any number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from spark_engine.kernel import Attrs, Plan, Scalar, Scratch, Specs, Tactic, Target

WHOLE = "ascending k"
MOST = 1 << 32  # the kernels count pieces in 32 bits


@dataclass(frozen=True)
class Line:
    """How a launch cuts its work, read off its macros and arguments."""

    tiles: int
    batches: int  # tiles that share weights
    blocks: int
    cut: int  # units of k between cuts
    rows: int  # weight rows of a tile
    k: int

    @classmethod
    def of(cls, plan: Plan) -> Line:
        """Of the plan's one launch."""
        (launch,) = plan.launches
        m, n, k = (int(a.value) for a in launch.args if isinstance(a, Scalar))
        macros = {name: int(value) for name, value in launch.defines}
        batches, rows = -(-m // macros["NB"]), macros["ROWS"]
        tiles = -(-n // rows) * batches
        return cls(tiles, batches, launch.grid[0], macros["CUT"], rows, k)

    @property
    def too_long(self) -> bool:
        """With a block a tile the kernels' products may not fit (a unit is 64 of k or more)."""
        return self.tiles * -(-self.k // (64 * self.cut)) * (self.tiles + 1) >= MOST


def order(plan: Plan) -> str | None:
    """What decides the bits of a row; None where its place among the rows does."""
    line = Line.of(plan)
    if line.blocks == line.tiles:
        return WHOLE
    if line.batches > 1:
        return None
    return f"{line.blocks} pieces, cut every {line.cut} units, tiles of {line.rows}"


def whole(stream: Tactic) -> Tactic:
    """The tactic with a block for each tile."""

    def refuse(attrs: Attrs, specs: Specs, target: Target) -> str | None:
        reason = stream.refuse(attrs, specs, target)
        if reason is not None:
            return reason
        line = Line.of(stream.plan(attrs, specs, target))
        if line.tiles == line.blocks:
            return "no tile is cut in any case"
        return f"{line.tiles} tiles are more than are counted" if line.too_long else None

    def plan(attrs: Attrs, specs: Specs, target: Target) -> Plan:
        made = stream.plan(attrs, specs, target)
        (launch,) = made.launches
        tiles = Line.of(made).tiles
        partial = Scratch(256)  # of no tile
        return Plan(
            (replace(launch, grid=(tiles, 1, 1), resident=False),), (partial, *made.scratch[1:])
        )

    def cost(attrs: Attrs, specs: Specs, target: Target) -> float:
        """Whole rounds of blocks."""
        tiles = Line.of(stream.plan(attrs, specs, target)).tiles
        rounds = -(-tiles // target.sms) * target.sms / tiles
        return stream.cost(attrs, specs, target) * max(1.02, rounds)

    return Tactic("whole tiles", stream.source, refuse, plan, cost, lambda a, s, t: WHOLE)


def streaming(stream: Tactic) -> tuple[Tactic, Tactic]:
    """The tactic, saying what decides its bits, and the one of whole tiles."""

    def bits(attrs: Attrs, specs: Specs, target: Target) -> str | None:
        return order(stream.plan(attrs, specs, target))

    return replace(stream, bits=bits), whole(stream)
