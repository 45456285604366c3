"""Planner of the collectives of ranks on several hosts: NCCL moves the bytes.

No GPU reads another host's memory: tactics over symmetric memory refuse nodes with `across`, and
these take only those. Bits are those of one host. NCCL adds two parts, a sum that is the same in
any order and rounded once. More parts it would round at every hop, in an order that depends on a
row's place in the buffer: those are gathered, and a kernel adds them in the order of ranks.
"""

from dataclasses import replace

from spark_engine.kernel import NCCL, Launch, Plan, Scalar
from spark_engine.plugins.kernels.common import row_quant as rq
from spark_engine.plugins.launch import Candidate, Kernel, Node
from spark_engine.tensors import DType

SOURCE = "ranks/nccl_gathered_fma.cu"
VECTOR, THREADS = 16, 256  # bytes; of a block
# Predicted, not measured: seconds of a call over a network, and bytes a second of 100 Gb/s.
LATENCY, NETWORK = 20e-6, 10e9
KERNEL = 2e-6  # seconds of one more launch
HERE = "its ranks are on several hosts, and no GPU reads another host's memory"
ONE_HOST = "its ranks share a host, where GPUs read each other's memory: --across-hosts asks for it"


def also_across(
    within: tuple[Candidate, ...], across: tuple[Candidate, ...]
) -> tuple[Candidate, ...]:
    """The tactics of one host and those of several hosts; each refuses the nodes of the other."""
    return (*map(_within, within), *map(_between, across))


def _within(candidate: Candidate) -> Candidate:
    def refuse(node: Node) -> str | None:
        return HERE if node.number("across") else candidate.refuse(node)

    return replace(candidate, refuse=refuse)


def _between(candidate: Candidate) -> Candidate:
    def refuse(node: Node) -> str | None:
        return candidate.refuse(node) if node.number("across") else ONE_HOST

    return replace(candidate, refuse=refuse)


def _call(symbol: str, node: Node, to: str) -> Launch:
    """A call of NCCL over x; `bytes` are this rank's."""
    kernel = Kernel(symbol, f"x {to} bytes", source=NCCL, pdl=False)
    return kernel.launch(node, 1, 1, {}, bytes=Scalar("i64", node["x"].nbytes))


def _kernel(symbol: str, node: Node, count: int, **macros: int) -> Launch:
    """A launch over `parts` [ranks, part], with a thread for each of `count` vectors of y."""
    blocks = max(1, min(4 * node.target.sms, -(-count // THREADS)))
    kernel = Kernel(symbol, "parts y count", pdl=False)
    return kernel.launch(node, blocks, THREADS, macros, count=Scalar("i64", count))


def _gathered(node: Node, symbol: str, count: int, **macros: int) -> Plan:
    """An all-gather, then a kernel over the parts."""
    node = node.with_scratch(parts=node.number("ranks") * node["x"].nbytes)
    macros = {"RANKS": node.number("ranks"), **macros}
    return node.plan(_call("all_gather", node, "parts"), _kernel(symbol, node, count, **macros))


def _refuse_sum(node: Node) -> str | None:
    x = node["x"]
    if x.dtype is not DType.BF16:
        return f"x is {x.dtype}; parts are added as bf16"
    return rq.refuse_rows((x,), node.dim("H"))


def _refuse_own_order(node: Node) -> str | None:
    if (ranks := node.number("ranks")) > 2:
        return f"NCCL adds {ranks} parts in its own order, and rounds at every hop"
    return _refuse_sum(node)


def _plan_sum(node: Node) -> Plan:
    return node.plan(_call("all_reduce", node, "y"))


def _plan_parts(node: Node) -> Plan:
    return _gathered(node, "sum_parts", node["x"].nbytes // VECTOR)


def refuse_logits(node: Node) -> str | None:
    """Why the logits of a rank cannot be gathered, or None."""
    columns = node.dim("V/ranks")
    return f"{columns} logits do not come in vectors of 4" if columns % 4 else None


def _plan_logits(node: Node) -> Plan:
    ranks, nbytes, rows = node.number("ranks"), node["x"].nbytes, node.dim("rows")
    if rows == 1:  # the gathered parts are side by side
        return node.plan(_call("all_gather", node, "y"))
    columns = nbytes // rows // VECTOR
    return _gathered(node, "side_by_side", ranks * nbytes // VECTOR, COLUMNS=columns)


def _cost(node: Node) -> float:
    others = node.number("ranks") - 1
    return LATENCY + others * node["x"].nbytes / NETWORK


def _cost_parts(node: Node) -> float:
    read = node.number("ranks") * node["x"].nbytes / node.target.bandwidth
    return _cost(node) + KERNEL + read


def one_order(node: Node) -> str:
    """`Candidate.reduction` of every sum over ranks, on one host too."""
    return "ranks"


SUMS = (
    Candidate("nccl_sum", SOURCE, _plan_sum, _cost, _refuse_own_order, one_order, "two hosts"),
    Candidate("nccl_parts", SOURCE, _plan_parts, _cost_parts, _refuse_sum, one_order, "more hosts"),
)
LOGITS = (
    Candidate("nccl_gather", SOURCE, _plan_logits, _cost_parts, refuse_logits, why="several hosts"),
)
