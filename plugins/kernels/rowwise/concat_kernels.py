"""Planner of the standard Concat: projections that no rule merged, and a block drafter's taps."""

import math

from spark_engine.kernel import Plan
from spark_engine.plugins.kernels.common import row_quant as rq
from spark_engine.plugins.launch import Candidate, Kernel, Node, standard

PARTS = 8
THREADS = 256
WIDEST = 16  # bytes of one access


def parts(count: int) -> tuple[str, ...]:
    """The operands' names."""
    return tuple(f"part{i}" for i in range(count))


def refuse(node: Node) -> str | None:
    """Why the kernel does not take the node, or None: it joins columns of up to PARTS matrices."""
    shapes, dtypes = [list(s.shape) for s in node.specs], [s.dtype for s in node.specs]
    if any(len(shape) != 2 for shape in shapes) or node.number("axis") not in (1, -1):
        return f"axis {node.attrs['axis']} of {shapes}; columns of matrices are joined"
    if len(shapes) > PARTS:
        return f"{len(shapes)} parts; up to {PARTS} are joined"
    if len({(s.dtype, s.dims[0]) for s in node.specs}) != 1:
        return f"parts {shapes} of {[str(d) for d in dtypes]}; rows and dtype must agree"
    first = node["part0"]
    if first.dtype.itemsize > 4:
        return f"{first.name} is {first.dtype}; elements of up to 4 bytes are joined"
    return None if _bytes(node) > 1 else f"rows of {shapes} are no pairs of bytes"


def _bytes(node: Node) -> int:
    """The widest access that divides every row."""
    return math.gcd(WIDEST, *(s.dims[1] * s.dtype.itemsize for s in node.specs))


def plan(node: Node) -> Plan:
    """One launch; missing parts are the first operand again, with no column."""
    width = _bytes(node)
    columns = [s.dims[1] * s.dtype.itemsize // width for s in node.specs]
    columns += [0] * (PARTS - len(columns))
    macros = {"BYTES": width, "THREADS": THREADS} | {f"W{i}": n for i, n in enumerate(columns)}
    names = [*parts(len(node.specs)), *["part0"] * (PARTS - len(node.specs))]
    grid = (-(-sum(columns) // THREADS), node["part0"].dims[0])
    kernel = Kernel("concat", f"{' '.join(names)} y")
    return node.plan(kernel.launch(node, grid, THREADS, macros))


def cost(node: Node) -> float:
    """Seconds to read and write every part once."""
    return rq.seconds(node.specs, sum(s.nbytes for s in node.specs), node.target)


CANDIDATES = (Candidate("columns", "rowwise/concat_copy.cu", plan, cost, refuse),)
CONCAT = standard("Concat", CANDIDATES, parts, "y")
