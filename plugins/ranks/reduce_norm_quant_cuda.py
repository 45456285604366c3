"""The CUDA side of `reduce_norm_quant`: the sum over ranks and the norm in one launch, or in two.

`one_shot` and `push` are one launch of reduce_norm.cu; `<way>_apart` are the launches of all_reduce
and of norm_quant, one after the other. Sums and norm keep the order that they have in the two ops,
so that all of them give the same bits.
"""

from __future__ import annotations

from functools import partial

from spark_engine.kernel import Attrs, Early, Plan
from spark_engine.plugins.common import row_quant_cuda as rq
from spark_engine.plugins.launch import Candidate, Kernel, Node
from spark_engine.plugins.ranks import all_reduce
from spark_engine.plugins.ranks import collectives_cuda as collectives
from spark_engine.plugins.rowwise import norm_quant, norm_quant_cuda

JOINED = (collectives.PUSH, collectives.ONE_SHOT)
(NORM,) = norm_quant_cuda.CANDIDATES
KERNEL = Kernel(
    "reduce_norm",
    f"x weight residual scales? sum {rq.OUTPUTS} rows peers rank",
    early=Early(begins=True, lets=True),
)


def _norm(node: Node, x: str = "x") -> Node:
    """That of norm_quant, over `x`."""
    attrs: Attrs = {"add": 1, **{n: node.attrs[n] for n in ("eps", "keep", "quant", "n")}}
    return node.part(norm_quant.OP, attrs, x=x)


def _total(node: Node, y: str = "x") -> Node:
    """That of all_reduce, whose sum is in `y`."""
    return node.part(all_reduce.OP, {"ranks": node.attrs["ranks"]}, y=y)


def _refuse(node: Node, way: str) -> str | None:
    reason = collectives.refuse_way(way, node.number("ranks"), node["x"].nbytes)
    return reason or NORM.refuse(_norm(node))


def _plan(node: Node, way: str) -> Plan:
    ranks, sms = node.number("ranks"), node.target.sms
    rows, k = node.shape("tokens", "H")
    threads, vectors = norm_quant_cuda.threads_of(k)
    numbers = {"THREADS": threads, "VECS": vectors, "RANKS": ranks}
    numbers |= {"WAY": collectives.WAYS.index(way)}
    macros = rq.macros(node, k, **numbers, EPS=node.real("eps"))
    blocks = min(rows, sms, collectives.MOST_BLOCKS)
    launch = KERNEL.launch(
        collectives.meeting(node, ranks), blocks, threads, macros, resident=ranks > 1, rows=rows
    )
    return node.plan(launch, symmetric=collectives.symmetric(way, ranks, node["x"].nbytes))


def _cost(node: Node, way: str) -> float:
    """The exchange, and what the norm's launch moves and takes."""
    ranks, nbytes = node.number("ranks"), node["x"].nbytes
    alone = NORM.cost(_norm(node))
    waves = -(-node.dim("tokens") // node.target.sms)  # rows of a block, one after the other
    slower = (waves - 1) * rq.LAUNCH_SECONDS / 2
    return collectives.exchange_seconds(way, ranks, nbytes) + alone + slower


def _refuse_apart(node: Node, total: Candidate) -> str | None:
    return total.refuse(_total(node)) or NORM.refuse(_norm(node))


def _plan_apart(node: Node, total: Candidate) -> Plan:
    node = node.with_scratch(total=node["x"])
    first, last = total.plan(_total(node, "total")), NORM.plan(_norm(node, "total"))
    launches = (*first.launches_of(total.source), *last.launches_of(NORM.source))
    return node.plan(*launches, symmetric=first.symmetric)


def _cost_apart(node: Node, total: Candidate) -> float:
    return total.cost(_total(node)) + rq.LAUNCH_SECONDS + NORM.cost(_norm(node))


def _joined(way: str) -> Candidate:
    return Candidate(
        way,
        "ranks/reduce_norm.cu",
        partial(_plan, way=way),
        partial(_cost, way=way),
        partial(_refuse, way=way),
        collectives.one_order,
    )


def _apart(total: Candidate) -> Candidate:
    return Candidate(
        f"{total.name}_apart",
        total.source,
        partial(_plan_apart, total=total),
        partial(_cost_apart, total=total),
        partial(_refuse_apart, total=total),
        collectives.one_order,
    )


CANDIDATES = (*(_joined(way) for way in JOINED), *(_apart(t) for t in collectives.SUMS))
