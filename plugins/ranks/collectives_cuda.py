"""The CUDA side of what ranks make together: one kernel each, over memory that all ranks read.

How much of it a launch needs (`Plan.symmetric`) follows from the layout in peers.cuh.
"""

from __future__ import annotations

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

SOURCE = "ranks/collectives.cu"
VECTOR = 16  # bytes
THREADS = (64, 128, 256, 512)  # of a block: few rows are spread over many multiprocessors
DATA, TURN = 16384, 256  # bytes before the data, and of one turn: peers.cuh
LATENCY = 4e-6  # seconds of the smallest collective
PEER_BANDWIDTH = 150e9  # bytes a second from one other GPU, where nothing was measured


def symmetric_bytes(nbytes: int) -> int:
    """Of the memory of each rank that shows so many bytes in a launch."""
    return DATA + 2 * TURN * -(-nbytes // TURN)


def _plan(symbol: str, attrs: Attrs, specs: Specs, target: Target, **macros: int) -> Plan:
    ranks, nbytes = int(attrs["ranks"]), specs[0].nbytes
    count = nbytes // VECTOR
    threads = next((t for t in THREADS if t * target.sms >= count), THREADS[-1])
    blocks = max(1, min(target.sms, -(-count // threads)))
    alone = ranks == 1
    where: tuple[Arg, ...] = (NULL, Scalar("i32", 0)) if alone else (Pointer("peers", 0), Rank())
    ends = (Pointer("input", 0), Pointer("output", 0))
    args = (*ends, Scalar("i64", count), *where)
    macros |= {"RANKS": ranks, "THREADS": threads}
    defines = tuple((k, str(v)) for k, v in macros.items())
    launch = Launch(
        symbol, (blocks, 1, 1), (threads, 1, 1), args, 0, (1, 1, 1), defines, True,
        resident=not alone,
    )  # fmt: skip
    return Plan((launch,), symmetric=0 if alone else symmetric_bytes(nbytes))


def _cost(attrs: Attrs, specs: Specs, target: Target) -> float:
    others = int(attrs["ranks"]) - 1
    nbytes = specs[0].nbytes
    return (
        (LATENCY if others else 0)
        + others * nbytes / PEER_BANDWIDTH
        + 3 * nbytes / (target.bandwidth)
    )


def _refuse_sum(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    if specs[0].dtype is not DType.BF16:
        return f"x is {specs[0].dtype}; the kernel adds bf16"
    return rq.refuse_rows(specs[:1], specs[0].dims[1])


def _plan_sum(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    return _plan("all_reduce", attrs, specs, target)


def _refuse_gather(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    columns = specs[0].dims[1]
    return f"{columns} logits do not come in vectors of 4" if columns % 4 else None


def _plan_gather(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    columns = specs[0].dims[1] * specs[0].dtype.itemsize // VECTOR
    return _plan("gather_logits", attrs, specs, target, COLUMNS=columns)


_SUM = Cuda((Tactic("one_shot", SOURCE, _refuse_sum, _plan_sum, _cost),))
_GATHER = Cuda((Tactic("one_shot", SOURCE, _refuse_gather, _plan_gather, _cost),))
ALL_REDUCE = nccl_cuda.also_across(_SUM, nccl_cuda.SUMS)
GATHER_LOGITS = nccl_cuda.also_across(_GATHER, nccl_cuda.LOGITS)
