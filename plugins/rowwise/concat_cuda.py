"""The CUDA side of the standard Concat, which joins projections that no rule merged."""

from __future__ import annotations

import math

from spark_engine.kernel import Attrs, Cuda, Launch, Plan, Pointer, Specs, Tactic, Target
from spark_engine.plugins.common import row_quant_cuda as rq

PARTS = 4
THREADS = 256
WIDEST = 16  # bytes of one access


def refuse(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """Refuses anything but a few matrices of one dtype side by side."""
    shapes = [list(s.shape) for s in specs]
    if any(len(s.shape) != 2 for s in specs) or int(attrs["axis"]) not in (1, -1):
        return f"axis {attrs['axis']} of {shapes}; columns of matrices are joined"
    if len(specs) > PARTS:
        return f"{len(specs)} parts; up to {PARTS} are joined"
    if len({(s.dtype, s.dims[0]) for s in specs}) != 1:
        return f"parts {shapes} of {[str(s.dtype) for s in specs]}; rows and dtype must agree"
    if specs[0].dtype.itemsize > 4:
        return f"{specs[0].name} is {specs[0].dtype}; elements of up to 4 bytes are joined"
    return None if _bytes(specs) > 1 else f"rows of {shapes} are no pairs of bytes"


def _bytes(specs: Specs) -> int:
    """The widest access that divides every row."""
    return math.gcd(WIDEST, *(s.dims[1] * s.dtype.itemsize for s in specs))


def plan(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    """One launch; a part that is not there is the first again, with no column."""
    width = _bytes(specs)
    columns = [s.dims[1] * s.dtype.itemsize // width for s in specs]
    columns += [0] * (PARTS - len(columns))
    defines = {"BYTES": width, "THREADS": THREADS}
    defines |= {f"W{i}": n for i, n in enumerate(columns)}
    inputs = (Pointer("input", i if i < len(specs) else 0) for i in range(PARTS))
    launch = Launch(
        "concat",
        (-(-sum(columns) // THREADS), specs[0].dims[0], 1),
        (THREADS, 1, 1),
        (*inputs, Pointer("output", 0)),
        defines=tuple((name, str(value)) for name, value in defines.items()),
        pdl=True,
    )
    return Plan((launch,))


def cost(attrs: Attrs, specs: Specs, target: Target) -> float:
    """Every part once in and once out."""
    return rq.seconds(specs, sum(s.nbytes for s in specs), target)


CONCAT = Cuda((Tactic("columns", "rowwise/concat.cu", refuse, plan, cost),))
