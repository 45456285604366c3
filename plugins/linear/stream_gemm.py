"""How the streaming linear kernels (`stream_gemm.cuh`) are instantiated and launched.

Knows tiles, stages and the ring's size; the ops' own modules say what their operands are.
Imports no CUDA.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from spark_engine.kernel import Launch, Plan, Pointer, Scalar, Scratch, Target
from spark_engine.plugins.linear.weight_tiles import STRIP, UNIT

BATCHES = (8, 16, 32, 64, 128)
SMALL = 16
_RESERVED = 1024  # shared memory of the barriers, after which the ring is aligned


@dataclass(frozen=True)
class Format:
    """What sets one op's kernel apart: its name, its bits a weight, its bytes of scales."""

    symbol: str
    weight_bits: int
    scale_bytes: int  # of a strip and one unit
    x_bytes: int

    @property
    def unit(self) -> int:
        """Elements of k in a unit."""
        return UNIT // self.x_bytes

    @property
    def strip_unit_bytes(self) -> int:
        """Bytes of 16 rows and one unit."""
        return STRIP * self.unit * self.weight_bits // 8 + self.scale_bytes


@dataclass(frozen=True)
class Problem:
    """y[m, n] over k."""

    m: int
    n: int
    k: int


@dataclass(frozen=True)
class Tile:
    """One instantiation.

    Attributes:
        rows: weight rows of a tile.
        batch: activation rows of a tile.
        strips: 16-row strips of a warp.
        units: units of k in a stage.
        stages: of the ring.
        wgmma: Hopper's warpgroup instructions.
        resident: blocks that a multiprocessor holds, so that the next launch may begin early.
    """

    rows: int
    batch: int
    strips: int
    units: int
    stages: int
    wgmma: bool
    resident: int = 1

    @property
    def warps(self) -> int:
        """Those that multiply."""
        return self.rows // STRIP // self.strips

    @property
    def threads(self) -> int:
        """Consumers, and four warps of producers."""
        return (self.warps + 4) * 32

    def stage_bytes(self, form: Format) -> int:
        """Shared memory of one stage."""
        return self.units * (self.batch * UNIT + self.rows // STRIP * form.strip_unit_bytes)


def refuse(problem: Problem) -> str | None:
    """Why the kernels cannot do this, if so."""
    if problem.k % STRIP:
        return (
            f"the weight is {problem.n}x{problem.k}; its columns must be divisible by {STRIP} for "
            "16-byte loads of activations: pad the projection"
        )
    return None


def packs(n: int, k: int) -> bool:
    """Whether a weight of this shape is laid out for the kernels."""
    return refuse(Problem(1, n, k)) is None


def choose(problem: Problem, form: Format, target: Target) -> Tile:
    """The tile for a problem. Rows, and with them the cut of k, do not depend on m on Hopper."""
    most = 256 if form.weight_bits == 4 else 128
    batch = next((b for b in BATCHES if problem.m <= b), BATCHES[-1])
    if not target.wgmma and batch >= 64:
        most = 128  # the sums must fit 168 registers
    rows = next((r for r in (64, 128) if problem.n <= r), most)
    # On the other target few warps with many registers hold the sums of the largest batch. On
    # Hopper four warpgroups take turns: one multiplies, the others decode.
    strips = 2 if not target.wgmma and rows >= 128 and batch >= 128 else 1
    # mma.sync and wgmma give the same bits for bf16; the former is ahead at up to 8 rows.
    wgmma = target.wgmma and not (form.weight_bits == 4 and batch < SMALL)
    return fill(Tile(rows, batch, strips, 1, 2, wgmma), problem, form, target)


def cut_of(rows: int, problem: Problem, form: Format, target: Target) -> int:
    """Units of k between which the work may be cut, whatever the batch.

    Four, or two where weights are decoded and pieces become more equal by it (5120 x 17408: 11
    fours for 10.3, 45.2 -> 44.0 us at 128 rows). Others lose more by the tiles that are cut then
    (9216 x 2048 of FP8: 7.4 -> 8.7 us at 32 rows).
    """
    units = -(-problem.k // form.unit)
    tiles = -(-problem.n // rows)
    cut = next(c for c in (4, 2, 1) if units % c == 0)
    if cut < 4 or form.weight_bits != 4 or tiles * units < 4 * target.sms:
        return cut
    fours, twos = (c * -(-tiles * units // (c * target.sms)) for c in (4, 2))
    return 2 if twos <= 0.97 * fours else 4


def fill(tile: Tile, problem: Problem, form: Format, target: Target) -> Tile:
    """The tile with stages that suit: long ones while a few fit, as many as fit."""
    cut = cut_of(tile.rows, problem, form, target)
    one = replace(tile, units=1).stage_bytes(form)
    room = target.shared_bytes // tile.resident - 2 * _RESERVED * (tile.resident - 1) - _RESERVED
    decoding = form.weight_bits == 4
    wanted = ((4, 3 if tile.wgmma and decoding else 5), (2, 3 if tile.wgmma else 5))
    fitting = [u for u, s in wanted if cut % u == 0 and room // (u * one) >= s]
    per_stage = fitting[0] if fitting else 1
    # Where weights are decoded that is the pace: a deep ring only delays the first activations.
    most = 12 // per_stage if decoding else 12
    return replace(tile, units=per_stage, stages=min(room // (per_stage * one), most))


def plan(
    tile: Tile,
    problem: Problem,
    form: Format,
    target: Target,
    inputs: tuple[int, ...],
    dtype: str,
) -> Plan:
    """One launch: the inputs' pointers, y, partial sums, arrival counters, m, n, k."""
    tiles = -(-problem.n // tile.rows) * -(-problem.m // tile.batch)
    units = -(-problem.k // form.unit)
    cut = cut_of(tile.rows, problem, form, target)
    line = tiles * units // cut
    blocks = blocks_for(line, form, target)
    defines = {
        "ROWS": tile.rows,
        "NB": tile.batch,
        "MT": tile.strips,
        "KSUB": tile.units,
        "CUT": cut,
        "STAGES": tile.stages,
        "WG": int(tile.wgmma),
        "OUT_BF16": int(dtype == "bf16"),
        "RAGGED": int(problem.n % STRIP != 0),
        "WHOLE_K": int(problem.k % form.unit == 0),
        "RESIDENT": tile.resident,
    }
    sizes = (Scalar("i32", problem.m), Scalar("i32", problem.n), Scalar("i32", problem.k))
    launch = Launch(
        symbol=form.symbol,
        grid=(blocks, 1, 1),
        block=(tile.threads, 1, 1),
        args=(
            *(Pointer("input", i) for i in inputs),
            Pointer("output", 0),
            Pointer("scratch", 0),
            Pointer("scratch", 1),
            *sizes,
        ),
        shared=tile.stages * tile.stage_bytes(form),
        defines=tuple((name, str(value)) for name, value in defines.items()),
        overlaps=True,
        resident=blocks != tiles,  # else each has a tile to itself
    )
    partial = Scratch(2 * blocks * tile.rows * tile.batch * 4)
    return Plan((launch,), (partial, Scratch(2 * blocks * tile.warps * 4, zeroed=True)))


def blocks_for(line: int, form: Format, target: Target) -> int:
    """How many blocks share a line of so many cuts, at most one a multiprocessor.

    No more than the longest piece asks for: the fewer blocks, the fewer tiles are cut (16384 x
    5120 of FP8: none, 21.3 -> 19.5 us at 8 rows, 27.5 -> 24.5 at 128, H200). Where weights are
    decoded every multiprocessor counts, unless the pieces become equal.
    """
    fewest = -(-line // -(-line // target.sms))
    if form.weight_bits == 4 and line % fewest:
        return min(target.sms, line)
    return fewest


def bytes_moved(problem: Problem, form: Format, dtype: str) -> int:
    """Bytes that a launch must move: weights, scales, activations, results, each once."""
    units = -(-problem.k // form.unit)
    weights = problem.n * units * form.strip_unit_bytes // STRIP
    y = problem.m * problem.n * (2 if dtype == "bf16" else 4)
    return weights + problem.m * problem.k * form.x_bytes + y


def floor(problem: Problem, form: Format, target: Target, dtype: str) -> float:
    """Seconds that no kernel beats: bytes or arithmetic, whichever takes longer."""
    rate = target.bf16_flops * (2 if form.x_bytes == 1 else 1)
    work = 2 * math.prod((problem.m, problem.n, problem.k)) / rate
    return max(bytes_moved(problem, form, dtype) / target.bandwidth, work)
