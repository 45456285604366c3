"""Planner of the collectives: a kernel each, over symmetric memory.

`Plan.symmetric`, its size for a launch, follows from the layout in peers.cuh. All algorithms of a
sum give the same bits, so they have one `Tactic.reduction`.
"""

from functools import partial

from spark_engine.kernel import NULL, Plan, Scalar
from spark_engine.plugins.kernels.common import row_quant as rq
from spark_engine.plugins.kernels.ranks import nccl_kernels
from spark_engine.plugins.launch import ALONE, PEERS, RANK, Candidate, Kernel, Node
from spark_engine.tensors import DType

VECTOR = 16  # bytes
THREADS = (64, 128, 256, 512)  # of a block; few, if the rows are few, to use all multiprocessors
# peers.cuh: offset of pushed vectors, size of their buffer, bytes of a phase of the data.
PUSHED, PUSHED_BYTES, PHASE_BYTES = 16384, 8 << 20, 256
DATA = PUSHED + PUSHED_BYTES
MOST_BLOCKS = 252  # with flags for two synchronisations
ONE_SHOT, TWO_SHOT, PUSH = ALGORITHMS = ("one_shot", "two_shot", "push")  # numbered as in peers.cuh
# Seconds of the smallest collective, and bytes a second from other GPUs: ONE_SHOT was measured
# between two H200s (benchmarks/results/kernels/all_reduce_h200_tp2.json); the others are derived.
LATENCY = {ONE_SHOT: 4e-6, TWO_SHOT: 6e-6, PUSH: 2.5e-6}
PEER_BANDWIDTH = 300e9
SUM = Kernel("all_reduce", "x y count peers rank")
SIDE_BY_SIDE = Kernel("gather_logits", "x y count peers rank")


WHY = {
    ONE_SHOT: "medium parts: benchmarks/log/collectives.md",
    TWO_SHOT: "large parts of more than two ranks",
    PUSH: "small parts: benchmarks/log/collectives.md",
}


def symmetric_bytes(nbytes: int) -> int:
    """Symmetric memory, in bytes, of a launch in which each rank publishes `nbytes`."""
    return DATA + 2 * PHASE_BYTES * -(-nbytes // PHASE_BYTES)


def most_pushed(ranks: int) -> int:
    """The largest part of a rank, in bytes, that fits the buffer of pushed.cuh."""
    return PUSHED_BYTES // (2 * ranks) // 1024 * 512


def symmetric(algorithm: str, ranks: int, nbytes: int) -> int:
    """`Plan.symmetric` of a launch in which each rank has a part of `nbytes`."""
    if ranks == 1:
        return 0
    return DATA if algorithm == PUSH else symmetric_bytes(nbytes)


def refuse_algorithm(algorithm: str, ranks: int, nbytes: int) -> str | None:
    """Why the algorithm does not exchange parts of `nbytes`, or None."""
    if algorithm == PUSH and ranks == 1:
        return "one rank has no other to push to"
    if algorithm == PUSH and nbytes > most_pushed(ranks):
        return f"{nbytes} bytes a rank; at most {most_pushed(ranks)} are pushed"
    if algorithm == TWO_SHOT and ranks < 3:
        return "between two ranks a second shot saves nothing"
    return None


def exchange_seconds(algorithm: str, ranks: int, nbytes: int) -> float:
    """Seconds until every rank has received the others' parts of `nbytes`."""
    if ranks == 1:
        return 0.0
    times = {ONE_SHOT: ranks - 1, TWO_SHOT: 2 * (ranks - 1) / ranks, PUSH: 2 * (ranks - 1)}
    return LATENCY[algorithm] + times[algorithm] * nbytes / PEER_BANDWIDTH


def with_peers(node: Node, ranks: int) -> Node:
    """The node with the arguments `peers` and `rank`, the last ones of every kernel here."""
    if ranks == 1:
        return node.with_args(peers=NULL, rank=ALONE)
    return node.with_args(peers=PEERS, rank=RANK)


def _plan(kernel: Kernel, algorithm: str, node: Node, **macros: int) -> Plan:
    ranks, nbytes, sms = node.number("ranks"), node["x"].nbytes, node.target.sms
    count = nbytes // VECTOR
    each = ranks if algorithm == TWO_SHOT else 1  # vectors of a thread at a time
    threads = next((t for t in THREADS if t * sms * each >= count), THREADS[-1])
    blocks = max(1, min(sms, MOST_BLOCKS, -(-count // (threads * each))))
    macros |= {"RANKS": ranks, "THREADS": threads}
    launch = kernel.launch(
        with_peers(node, ranks), blocks, threads, macros, resident=ranks > 1,
        count=Scalar("i64", count),
    )  # fmt: skip
    return node.plan(launch, symmetric=symmetric(algorithm, ranks, nbytes))


def _refuse_sum(node: Node, algorithm: str) -> str | None:
    x = node["x"]
    if x.dtype is not DType.BF16:
        return f"x is {x.dtype}; the kernel adds bf16"
    return refuse_algorithm(algorithm, node.number("ranks"), x.nbytes) or rq.refuse_rows(
        (x,), node.dim("H")
    )


def _plan_sum(node: Node, algorithm: str) -> Plan:
    return _plan(SUM, algorithm, node, ALGORITHM=ALGORITHMS.index(algorithm))


def _cost(node: Node, algorithm: str) -> float:
    nbytes = node["x"].nbytes
    exchange = exchange_seconds(algorithm, node.number("ranks"), nbytes)
    return exchange + 3 * nbytes / node.target.bandwidth


def _plan_gather(node: Node) -> Plan:
    columns = node.dim("V/ranks") * node["x"].dtype.itemsize // VECTOR
    return _plan(SIDE_BY_SIDE, ONE_SHOT, node, COLUMNS=columns)


def _sum(algorithm: str) -> Candidate:
    return Candidate(
        algorithm,
        "ranks/all_reduce_peer.cu",
        partial(_plan_sum, algorithm=algorithm),
        partial(_cost, algorithm=algorithm),
        partial(_refuse_sum, algorithm=algorithm),
        nccl_kernels.one_order,
        why=WHY[algorithm],
    )


SHOTS = tuple(map(_sum, (ONE_SHOT, TWO_SHOT)))
SUMS = (*SHOTS, _sum(PUSH))
_GATHER = Candidate(
    ONE_SHOT,
    "ranks/gather_logits_peer.cu",
    _plan_gather,
    partial(_cost, algorithm=ONE_SHOT),
    nccl_kernels.refuse_logits,
    why="the only one of one host",
)
ALL_REDUCE = nccl_kernels.also_across(SUMS, nccl_kernels.SUMS)
GATHER_LOGITS = nccl_kernels.also_across((_GATHER,), nccl_kernels.LOGITS)
