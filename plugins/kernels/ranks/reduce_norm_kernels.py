"""Planner of `reduce_norm_quant`: the sum over ranks and the norm in one launch, or in two.

`one_shot` and `push` are one launch of reduce_norm_peer.cu; `<algorithm>_apart` is a launch of
all_reduce, then one of norm_quant, for rows that are many: those are not pushed. All sum in the
order of the two ops, so they give the same bits.
"""

from functools import partial
from typing import NamedTuple

from spark_engine.kernel import Attrs, Early, Plan
from spark_engine.op import Op
from spark_engine.plugins.kernels.common import row_quant as rq
from spark_engine.plugins.kernels.ranks import collectives_kernels as collectives
from spark_engine.plugins.kernels.ranks import nccl_kernels
from spark_engine.plugins.kernels.rowwise import norm_quant_kernels
from spark_engine.plugins.launch import Candidate, Kernel, Node

JOINED = (collectives.PUSH, collectives.ONE_SHOT)
(NORM,) = norm_quant_kernels.CANDIDATES
KERNEL = Kernel(
    "reduce_norm",
    f"x weight residual scales? sum {rq.OUTPUTS} rows peers rank",
    early=Early(begins=True, lets=True),
)


class Ops(NamedTuple):
    """The two ops that `reduce_norm_quant` fuses."""

    total: Op
    norm: Op


def _norm(node: Node, ops: Ops, x: str = "x") -> Node:
    """The node of norm_quant over `x`."""
    attrs: Attrs = {"add": 1, **{n: node.attrs[n] for n in ("eps", "keep", "quant", "n")}}
    return node.part(ops.norm, attrs, x=x)


def _total(node: Node, ops: Ops, y: str = "x") -> Node:
    """The node of all_reduce, with its sum in `y`."""
    return node.part(ops.total, {"ranks": node.attrs["ranks"]}, y=y)


def _refuse(node: Node, algorithm: str, ops: Ops) -> str | None:
    reason = collectives.refuse_algorithm(algorithm, node.number("ranks"), node["x"].nbytes)
    return reason or NORM.refuse(_norm(node, ops))


def _plan(node: Node, algorithm: str) -> Plan:
    ranks, sms = node.number("ranks"), node.target.sms
    rows, k = node.shape("tokens", "H")
    threads, vectors = rq.threads_of(k)
    numbers = {"THREADS": threads, "VECS": vectors, "RANKS": ranks}
    numbers |= {"ALGORITHM": collectives.ALGORITHMS.index(algorithm)}
    macros = rq.macros(node, k, **numbers, EPS=node.real("eps"))
    blocks = min(rows, sms, collectives.MOST_BLOCKS)
    launch = KERNEL.launch(
        collectives.with_peers(node, ranks), blocks, threads, macros, resident=ranks > 1, rows=rows
    )
    return node.plan(launch, symmetric=collectives.symmetric(algorithm, ranks, node["x"].nbytes))


def _cost(node: Node, algorithm: str, ops: Ops) -> float:
    """Seconds: the exchange, the norm's launch, and the further rows of a block."""
    ranks, nbytes = node.number("ranks"), node["x"].nbytes
    alone = NORM.cost(_norm(node, ops))
    waves = -(-node.dim("tokens") // node.target.sms)  # rows of a block, one after the other
    slower = (waves - 1) * rq.LAUNCH_SECONDS / 2
    return collectives.exchange_seconds(algorithm, ranks, nbytes) + alone + slower


def _refuse_apart(node: Node, total: Candidate, ops: Ops) -> str | None:
    return total.refuse(_total(node, ops)) or NORM.refuse(_norm(node, ops))


def _plan_apart(node: Node, total: Candidate, ops: Ops) -> Plan:
    node = node.with_scratch(total=node["x"])
    first = total.plan(_total(node, ops, "total"))
    last = NORM.plan(_norm(node, ops, "total"))
    launches = (*first.launches_of(total.source), *last.launches_of(NORM.source))
    return node.plan(*launches, symmetric=first.symmetric)


def _cost_apart(node: Node, total: Candidate, ops: Ops) -> float:
    return total.cost(_total(node, ops)) + rq.LAUNCH_SECONDS + NORM.cost(_norm(node, ops))


def _joined(algorithm: str, ops: Ops) -> Candidate:
    return Candidate(
        algorithm,
        "ranks/reduce_norm_peer.cu",
        partial(_plan, algorithm=algorithm),
        partial(_cost, algorithm=algorithm, ops=ops),
        partial(_refuse, algorithm=algorithm, ops=ops),
        nccl_kernels.one_order,
        why="few rows: the norm in the launch of the sum",
    )


def _apart(total: Candidate, ops: Ops) -> Candidate:
    return Candidate(
        f"{total.name}_apart",
        total.source,
        partial(_plan_apart, total=total, ops=ops),
        partial(_cost_apart, total=total, ops=ops),
        partial(_refuse_apart, total=total, ops=ops),
        nccl_kernels.one_order,
        why="many rows: each launch fills the GPU",
    )


def candidates(total: Op, norm: Op) -> tuple[Candidate, ...]:
    """The candidates of `reduce_norm_quant`, of the ops all_reduce and norm_quant."""
    ops = Ops(total, norm)
    return (*(_joined(w, ops) for w in JOINED), *(_apart(t, ops) for t in collectives.SHOTS))
