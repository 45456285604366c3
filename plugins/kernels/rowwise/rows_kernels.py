"""Planner of copies and sums of whole rows: last_rows and the standard Add; embed's launch."""

from spark_engine.kernel import Plan
from spark_engine.plugins.kernels.common import row_quant as rq
from spark_engine.plugins.launch import Candidate, Kernel, Node, standard

SOURCE = "rowwise/rows_copy.cu"
THREADS = 256
LAST = Kernel("last_rows", "x counts y")
SUM = Kernel("add", "a b y")


def plan_rows(kernel: Kernel, node: Node, rows: int, h: int, **macros: float) -> Plan:
    """One launch of a thread for each vector of [rows, h]."""
    vectors = h // rq.VECTOR
    threads = min(THREADS, rq.whole_warps(vectors))
    grid = (-(-vectors // threads), rows)
    macros = {"THREADS": threads, "H": h, **macros}
    return node.plan(kernel.launch(node, grid, threads, macros))


def rows_once(node: Node) -> float:
    """An estimate: rows are read and written once."""
    return rq.seconds((node["x"],), node["x"].nbytes, node.target)


def _refuse_add(node: Node) -> str | None:
    a, b = node["a"], node["b"]
    if a.shape != b.shape:
        return f"{a.name} is {list(a.shape)} and {b.name} {list(b.shape)}; one shape is added"
    return rq.refuse_rows((a, b), a.dims[1])


LAST_ROWS = (
    Candidate(
        "rows",
        SOURCE,
        lambda n: plan_rows(LAST, n, *n.shape("rows", "H"), TILE=n.number("tile")),
        lambda n: rq.seconds((), n.dim("rows") * n.dim("H") * 4, n.target),
        lambda n: rq.refuse_rows((n["x"],), n.dim("H")),
    ),
)
ADDED = Candidate(
    "rows",
    SOURCE,
    lambda n: plan_rows(SUM, n, *n["a"].dims),
    lambda n: rq.seconds(n.specs, n["a"].nbytes, n.target),
    _refuse_add,
)
ADD = standard("Add", (ADDED,), lambda count: ("a", "b"), "y")
