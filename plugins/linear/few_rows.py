"""How the linear kernels of few rows (`few_rows.cuh`) are instantiated and launched.

Knows strips, shares of k, and the rings; the ops' own modules say what their operands are.
Imports no CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from spark_engine.kernel import Attrs, Launch, Plan, Pointer, Scalar, Specs, Tactic, Target
from spark_engine.plugins.linear.stream_gemm import Format, Problem, floor
from spark_engine.plugins.linear.weight_tiles import STRIP, UNIT

MOST_ROWS = 16
_HELD = 9  # strips whose sums a warp holds
_CHUNK = 5  # strips of a stage
_BUSY = 65536  # bytes of rings
_FIXED = 2048  # shared memory of the barriers and what the system keeps
_DECODED = 16e-9  # seconds in which a multiprocessor decodes an NVFP4 strip's unit, as on an H200

Named = Callable[[Attrs, Specs], Problem]
Refuse = Callable[[Attrs, Specs, Target], str | None]


@dataclass(frozen=True)
class Share:
    """How the work is shared out. `splits` and `wk`, the order of sums, depend on n and k alone.

    Attributes:
        splits: blocks of a cluster, each with its share of k.
        each: strips of a cluster.
        wk, wn: shares of k and of the strips, a warp each.
        chunk: strips of a stage.
        stages: of a warp's ring.
    """

    splits: int
    each: int
    wk: int
    wn: int
    chunk: int = 1
    stages: int = 0

    @property
    def warps(self) -> int:
        """Of a block."""
        return self.wk * self.wn

    @property
    def held(self) -> int:
        """Strips of a warp."""
        return -(-self.each // self.wn)

    def sums_bytes(self, problem: Problem) -> int:
        """Of a warp."""
        return self.held * batch(problem) * 64

    def static_bytes(self, problem: Problem) -> int:
        """Shared memory beside the rings: what the other blocks of the cluster leave, barriers."""
        return (self.splits - 1) * self.wn * self.sums_bytes(problem) + _FIXED


def batch(problem: Problem) -> int:
    """Rows of batch of the instantiation."""
    return 8 if problem.m <= 8 else 16


def _strips(problem: Problem) -> int:
    return -(-problem.n // STRIP)


def _each(problem: Problem, target: Target, splits: int) -> int:
    return -(-_strips(problem) // (target.sms // splits))


def choose(problem: Problem, form: Format, target: Target) -> Share:
    """The shares that leave no multiprocessor much more to decode than another."""
    splits, units = 1, -(-problem.k // form.unit)
    if target.clusters and form.weight_bits == 4:  # others leave the multiprocessors idle anyway
        one, two = (_each(problem, target, s) * -(-units // s) for s in (1, 2))
        splits = 2 if two < 0.95 * one else 1
    each = _each(problem, target, splits)
    # 16 warps to decode; of 8, each has more memory
    wide = target.large_shared and form.weight_bits == 4
    wk, wn = (16, 1) if wide and each <= _HELD else (8, 2 if wide else 1)
    return fill(Share(splits, each, wk, wn), problem, form, target)


def fill(share: Share, problem: Problem, form: Format, target: Target) -> Share:
    """The share with stages that suit: long ones, and no more of them than keep memory busy.

    None suits where `stages` comes back as 0.
    """
    room = target.shared_bytes - share.static_bytes(problem) - share.warps * _inputs(problem)
    strips = room // share.warps // form.strip_unit_bytes
    for chunks in range(1, share.held + 1):
        chunk = -(-share.held // chunks)
        stage = chunk * form.strip_unit_bytes
        least = max(share.sums_bytes(problem), _BUSY // share.warps)
        stages = max(2 if chunks == 1 else 3, -(-least // stage))
        if chunk <= _CHUNK and stages * chunk <= strips:
            return replace(share, chunk=chunk, stages=stages)
    return replace(share, chunk=1, stages=0)


def _inputs(problem: Problem) -> int:
    """Shared memory of a warp's activations: two units."""
    return 2 * batch(problem) * UNIT


def refuse(problem: Problem, form: Format, target: Target) -> str | None:
    """Why the kernels cannot do this, if so."""
    if problem.m > MOST_ROWS:
        return f"{problem.m} rows are not few; up to {MOST_ROWS} are served"
    share = choose(problem, form, target)
    if share.held > _HELD or not share.stages:
        return (
            f"{share.each} strips of {STRIP} rows for each multiprocessor; their sums and as many "
            "weights on their way are more than a block holds"
        )
    return None


def plan(
    share: Share,
    problem: Problem,
    form: Format,
    target: Target,
    inputs: tuple[int, ...],
    dtype: str,
) -> Plan:
    """One launch: the inputs' pointers, y, m, n, k, strips of a cluster."""
    defines = {
        "FEW_ROWS": 1,
        "NB": batch(problem),
        "WK": share.wk,
        "WN": share.wn,
        "MT": share.held,
        "CHUNK": share.chunk,
        "STAGES": share.stages,
        "SPLITS": share.splits,
        "OUT_BF16": int(dtype == "bf16"),
        "RAGGED": int(problem.n % STRIP != 0),
    }
    ring = share.stages * share.chunk * form.strip_unit_bytes
    sizes = (problem.m, problem.n, problem.k, share.each)
    launch = Launch(
        symbol=f"{form.symbol}_few",
        grid=(share.splits, -(-_strips(problem) // share.each), 1),
        block=(share.warps * 32, 1, 1),
        args=(
            *(Pointer("input", i) for i in inputs),
            Pointer("output", 0),
            *(Scalar("i32", size) for size in sizes),
        ),
        shared=share.warps * (ring + _inputs(problem)),
        cluster=(share.splits, 1, 1),
        defines=tuple((name, str(value)) for name, value in defines.items()),
        overlaps=True,
    )
    return Plan((launch,))


def tactic(form: Format, inputs: tuple[int, ...], named: Named, refused: Refuse) -> Tactic:
    """The tactic of an op: `named` gives its problem, `refused` what no kernel of it takes.

    Its sums are in one order for any number of rows.
    """

    def refusing(attrs: Attrs, specs: Specs, target: Target) -> str | None:
        reason = refused(attrs, specs, target)
        return reason or refuse(named(attrs, specs), form, target)

    def planned(attrs: Attrs, specs: Specs, target: Target) -> Plan:
        problem = named(attrs, specs)
        share = choose(problem, form, target)
        return plan(share, problem, form, target, inputs, str(attrs["dtype"]))

    def cost(attrs: Attrs, specs: Specs, target: Target) -> float:
        """The floor, the longest decoding or what the shortest take, and a launch."""
        problem = named(attrs, specs)
        share = choose(problem, form, target)
        work = share.each * -(-problem.k // form.unit) // share.splits
        decoding = work * _DECODED * (1 + batch(problem) / 32) if form.weight_bits == 4 else 0.0
        least = 1.05 * floor(problem, form, target, str(attrs["dtype"]))
        return max(least, decoding, 2e-6) + 1e-6

    return Tactic("few rows", f"linear/{form.symbol}.cu", refusing, planned, cost)
