"""Planner of the norms over whole rows: rms_norm and norm_quant, one kernel."""

from spark_engine.kernel import Attrs, Early, Plan
from spark_engine.plugins.kernels.common import row_quant as rq
from spark_engine.plugins.launch import Candidate, Kernel, Node

MOST_VECTORS = 2
KERNEL = Kernel(
    "norm_quant",
    f"x weight residual? scales? sum? {rq.OUTPUTS}",
    early=Early(begins=True, lets=True),
)


def _refuse(node: Node) -> str | None:
    k = node.dim("K")
    most = rq.MOST_THREADS * MOST_VECTORS * rq.VECTOR
    if k > most:
        return f"a row of {k} does not fit the registers of a block; at most {most} do"
    used = [node[name] for name in ("x", "residual") if name in node]
    return rq.refuse_rows(used, k) or rq.refuse_copies(node)


def _plan(node: Node) -> Plan:
    rows, k = node.shape("tokens", "K")
    threads, vectors = rq.threads_of(k)
    numbers = {"THREADS": threads, "VECS": vectors, "ADD": node.number("add")}
    macros = rq.macros(node, k, **numbers, EPS=node.real("eps"))
    return node.plan(KERNEL.launch(node, rows, threads, macros))


def _cost(node: Node) -> float:
    rows, k = node.shape("tokens", "K")
    written = 2 * (node.number("add") + node.number("keep")) + node.number("n")
    return rq.seconds(node.specs, rows * k * written, node.target)


def alone(attrs: Attrs) -> Attrs:
    """The attributes of rms_norm as a norm_quant that keeps y and quantises nothing."""
    return {**attrs, "add": 0, "keep": 1, "quant": "none", "n": 1}


CANDIDATES = (Candidate("row", "rowwise/norm_quant_fma.cu", _plan, _cost, _refuse),)
