"""The CUDA side of the collectives: one kernel each, over memory that all ranks read.

How much of it a launch needs (`Plan.symmetric`) follows from the layout in peers.cuh. A sum has
the same bits whichever way it is made, so that every way has one order (`Tactic.reduction`).
"""

from __future__ import annotations

from functools import partial

from spark_engine.kernel import (
    NULL,
    Arg,
    Attrs,
    Cuda,
    Launch,
    Plan,
    Pointer,
    Rank,
    Scalar,
    Specs,
    Tactic,
    Target,
)
from spark_engine.plugins.common import row_quant_cuda as rq
from spark_engine.plugins.ranks import nccl_cuda
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
        return "alone there is nobody to push to"
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


def where(ranks: int) -> tuple[Arg, ...]:
    """The table of regions and the rank, the last arguments of every kernel here."""
    return (NULL, Scalar("i32", 0)) if ranks == 1 else (Pointer("peers", 0), Rank())


def _plan(symbol: str, way: str, attrs: Attrs, specs: Specs, target: Target, **macros: int) -> Plan:
    ranks, nbytes = int(attrs["ranks"]), specs[0].nbytes
    count = nbytes // VECTOR
    each = ranks if way == TWO_SHOT else 1  # vectors of a thread at a time
    threads = next((t for t in THREADS if t * target.sms * each >= count), THREADS[-1])
    blocks = max(1, min(target.sms, MOST_BLOCKS, -(-count // (threads * each))))
    ends = (Pointer("input", 0), Pointer("output", 0))
    args = (*ends, Scalar("i64", count), *where(ranks))
    macros |= {"RANKS": ranks, "THREADS": threads}
    defines = tuple((k, str(v)) for k, v in macros.items())
    launch = Launch(
        symbol, (blocks, 1, 1), (threads, 1, 1), args, 0, (1, 1, 1), defines, True,
        resident=ranks > 1,
    )  # fmt: skip
    return Plan((launch,), symmetric=symmetric(way, ranks, nbytes))


def _refuse_sum(attrs: Attrs, specs: Specs, target: Target, way: str) -> str | None:
    if specs[0].dtype is not DType.BF16:
        return f"x is {specs[0].dtype}; the kernel adds bf16"
    reason = refuse_way(way, int(attrs["ranks"]), specs[0].nbytes)
    return reason or rq.refuse_rows(specs[:1], specs[0].dims[1])


def _plan_sum(attrs: Attrs, specs: Specs, target: Target, way: str) -> Plan:
    return _plan("all_reduce", way, attrs, specs, target, WAY=WAYS.index(way))


def _cost(attrs: Attrs, specs: Specs, target: Target, way: str) -> float:
    nbytes = specs[0].nbytes
    return exchange_seconds(way, int(attrs["ranks"]), nbytes) + 3 * nbytes / target.bandwidth


def _order(attrs: Attrs, specs: Specs, target: Target) -> str:
    return ORDER


def _refuse_gather(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    columns = specs[0].dims[1]
    return f"{columns} logits do not come in vectors of 4" if columns % 4 else None


def _plan_gather(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    columns = specs[0].dims[1] * specs[0].dtype.itemsize // VECTOR
    return _plan("gather_logits", ONE_SHOT, attrs, specs, target, COLUMNS=columns)


def _sum(way: str) -> Tactic:
    return Tactic(
        way,
        "ranks/all_reduce.cu",
        partial(_refuse_sum, way=way),
        partial(_plan_sum, way=way),
        partial(_cost, way=way),
        _order,
    )


SUMS = tuple(_sum(way) for way in WAYS)
_SIDE_BY_SIDE = Tactic(
    ONE_SHOT,
    "ranks/gather_logits.cu",
    _refuse_gather,
    _plan_gather,
    partial(_cost, way=ONE_SHOT),
)
ALL_REDUCE = nccl_cuda.also_across(Cuda(SUMS), nccl_cuda.SUMS)
GATHER_LOGITS = nccl_cuda.also_across(Cuda((_SIDE_BY_SIDE,)), nccl_cuda.LOGITS)
