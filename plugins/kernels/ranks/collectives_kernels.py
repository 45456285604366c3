"""The CUDA side of the collectives: one kernel each, over memory that all ranks read.

How much of it a launch needs (`Plan.symmetric`) follows from the layout in peers.cuh. A sum has
the same bits whichever way it is made, so that every way has one order (`Tactic.reduction`).
"""

from __future__ import annotations

from functools import partial

from spark_engine.kernel import NULL, Plan, Scalar
from spark_engine.plugins.kernels.common import row_quant as rq
from spark_engine.plugins.kernels.ranks import nccl_kernels
from spark_engine.plugins.launch import ALONE, PEERS, RANK, Candidate, Kernel, Node
from spark_engine.tensors import DType

VECTOR = 16  # bytes
THREADS = (64, 128, 256, 512)  # of a block: few rows are spread over many multiprocessors
# peers.cuh: bytes before what is pushed, of what is pushed, before the data, and of one turn of it.
PUSHED, PUSHED_BYTES, TURN = 16384, 8 << 20, 256
DATA = PUSHED + PUSHED_BYTES
MOST_BLOCKS = 252  # that meet twice
ONE_SHOT, TWO_SHOT, PUSH = WAYS = ("one_shot", "two_shot", "push")  # numbered as in peers.cuh
# Seconds of the smallest collective, and bytes a second from other GPUs: measured between two H200s
# (benchmarks/results/kernels/all_reduce_h200_tp2.json); of the two later ones computed from it.
LATENCY = {ONE_SHOT: 4e-6, TWO_SHOT: 6e-6, PUSH: 2.5e-6}
PEER_BANDWIDTH = 300e9
ORDER = "ranks"
SUM = Kernel("all_reduce", "x y count peers rank")
SIDE_BY_SIDE = Kernel("gather_logits", "x y count peers rank")


WHY = {
    ONE_SHOT: "medium parts: benchmarks/log/collectives.md",
    TWO_SHOT: "large parts of more than two ranks",
    PUSH: "small parts: benchmarks/log/collectives.md",
}


def symmetric_bytes(nbytes: int) -> int:
    """Of the memory of each rank that shows so many bytes in a launch."""
    return DATA + 2 * TURN * -(-nbytes // TURN)


def most_pushed(ranks: int) -> int:
    """Bytes of a rank's part that can be pushed: pushed.cuh."""
    return PUSHED_BYTES // (2 * ranks) // 1024 * 512


def symmetric(way: str, ranks: int, nbytes: int) -> int:
    """`Plan.symmetric` of a launch in which each rank has a part of so many bytes."""
    if ranks == 1:
        return 0
    return DATA if way == PUSH else symmetric_bytes(nbytes)


def refuse_way(way: str, ranks: int, nbytes: int) -> str | None:
    """Why parts of so many bytes cannot be exchanged this way."""
    if way == PUSH and ranks == 1:
        return "one rank has no other to push to"
    if way == PUSH and nbytes > most_pushed(ranks):
        return f"{nbytes} bytes a rank; at most {most_pushed(ranks)} are pushed"
    if way == TWO_SHOT and ranks < 3:
        return "between two ranks a second shot saves nothing"
    return None


def exchange_seconds(way: str, ranks: int, nbytes: int) -> float:
    """Until every rank has what it needs of the others'."""
    if ranks == 1:
        return 0.0
    times = {ONE_SHOT: ranks - 1, TWO_SHOT: 2 * (ranks - 1) / ranks, PUSH: 2 * (ranks - 1)}
    return LATENCY[way] + times[way] * nbytes / PEER_BANDWIDTH


def meeting(node: Node, ranks: int) -> Node:
    """With the table of regions and the rank, the last arguments of every kernel here."""
    if ranks == 1:
        return node.with_args(peers=NULL, rank=ALONE)
    return node.with_args(peers=PEERS, rank=RANK)


def _plan(kernel: Kernel, way: str, node: Node, **macros: int) -> Plan:
    ranks, nbytes, sms = node.number("ranks"), node["x"].nbytes, node.target.sms
    count = nbytes // VECTOR
    each = ranks if way == TWO_SHOT else 1  # vectors of a thread at a time
    threads = next((t for t in THREADS if t * sms * each >= count), THREADS[-1])
    blocks = max(1, min(sms, MOST_BLOCKS, -(-count // (threads * each))))
    macros |= {"RANKS": ranks, "THREADS": threads}
    launch = kernel.launch(
        meeting(node, ranks), blocks, threads, macros, resident=ranks > 1,
        count=Scalar("i64", count),
    )  # fmt: skip
    return node.plan(launch, symmetric=symmetric(way, ranks, nbytes))


def _refuse_sum(node: Node, way: str) -> str | None:
    x = node["x"]
    if x.dtype is not DType.BF16:
        return f"x is {x.dtype}; the kernel adds bf16"
    return refuse_way(way, node.number("ranks"), x.nbytes) or rq.refuse_rows((x,), node.dim("H"))


def _plan_sum(node: Node, way: str) -> Plan:
    return _plan(SUM, way, node, WAY=WAYS.index(way))


def _cost(node: Node, way: str) -> float:
    nbytes = node["x"].nbytes
    exchange = exchange_seconds(way, node.number("ranks"), nbytes)
    return exchange + 3 * nbytes / node.target.bandwidth


def one_order(node: Node) -> str:
    """`Candidate.reduction` of every sum."""
    return ORDER


def _refuse_gather(node: Node) -> str | None:
    columns = node.dim("V/ranks")
    return f"{columns} logits do not come in vectors of 4" if columns % 4 else None


def _plan_gather(node: Node) -> Plan:
    columns = node.dim("V/ranks") * node["x"].dtype.itemsize // VECTOR
    return _plan(SIDE_BY_SIDE, ONE_SHOT, node, COLUMNS=columns)


def _sum(way: str) -> Candidate:
    return Candidate(
        way,
        "ranks/all_reduce_peer.cu",
        partial(_plan_sum, way=way),
        partial(_cost, way=way),
        partial(_refuse_sum, way=way),
        one_order,
        why=WHY[way],
    )


SUMS = tuple(_sum(way) for way in WAYS)
_GATHER = Candidate(
    ONE_SHOT,
    "ranks/gather_logits_peer.cu",
    _plan_gather,
    partial(_cost, way=ONE_SHOT),
    _refuse_gather,
    why="the only one of one host",
)
ALL_REDUCE = nccl_kernels.also_across(SUMS, nccl_kernels.SUMS)
GATHER_LOGITS = nccl_kernels.also_across((_GATHER,), nccl_kernels.LOGITS)
