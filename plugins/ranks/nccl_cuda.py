"""The collectives of ranks on several hosts: NCCL moves bytes; sums are those of one host.

No GPU reads another host's memory, so tactics over peers refuse nodes with `across`, and these take
them alone. Bits are those of one host: the sum of two is the same in any order, rounded once; that
of more NCCL would round at every hop, in an order that a row's place in the buffer decides, so
there the parts are gathered and added here in the order of ranks.
"""

from __future__ import annotations

from dataclasses import replace

from spark_engine.kernel import (
    NCCL,
    Attrs,
    Cuda,
    Launch,
    Plan,
    Pointer,
    Scalar,
    Scratch,
    Specs,
    Tactic,
    Target,
)
from spark_engine.plugins.common import row_quant_cuda as rq
from spark_engine.tensors import DType

SOURCE = "ranks/gathered.cu"
VECTOR, THREADS = 16, 256  # bytes; of a block
# Predicted, where nothing was measured: of a call over a network, and bytes a second of 100 Gb/s.
LATENCY, NETWORK = 20e-6, 10e9
KERNEL = 2e-6  # seconds of one more launch
HERE = "its ranks are on several hosts, and no GPU reads another host's memory"
ONE_HOST = "its ranks share a host, where GPUs read each other's memory: --across-hosts asks for it"


def also_across(within: Cuda, across: tuple[Tactic, ...]) -> Cuda:
    """The tactics of one host, and those that take its place between hosts."""
    return replace(within, tactics=(*map(_within, within.tactics), *map(_between, across)))


def _within(tactic: Tactic) -> Tactic:
    def refuse(attrs: Attrs, specs: Specs, target: Target) -> str | None:
        return HERE if attrs.get("across") else tactic.refuse(attrs, specs, target)

    return replace(tactic, refuse=refuse)


def _between(tactic: Tactic) -> Tactic:
    def refuse(attrs: Attrs, specs: Specs, target: Target) -> str | None:
        return tactic.refuse(attrs, specs, target) if attrs.get("across") else ONE_HOST

    return replace(tactic, refuse=refuse)


def _call(symbol: str, to: Pointer, nbytes: int) -> Launch:
    """A call of NCCL over the node's input; `nbytes` are this rank's."""
    args = (Pointer("input", 0), to, Scalar("i64", nbytes))
    return Launch(symbol, (1, 1, 1), (1, 1, 1), args, source=NCCL)


def _kernel(symbol: str, count: int, target: Target, **macros: int) -> Launch:
    """Over scratch [ranks, part], a thread for each of `count` vectors of the output."""
    blocks = max(1, min(4 * target.sms, -(-count // THREADS)))
    args = (Pointer("scratch", 0), Pointer("output", 0), Scalar("i64", count))
    defines = tuple((name, str(number)) for name, number in macros.items())
    return Launch(symbol, (blocks, 1, 1), (THREADS, 1, 1), args, defines=defines)


def _refuse_sum(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    if specs[0].dtype is not DType.BF16:
        return f"x is {specs[0].dtype}; parts are added as bf16"
    return rq.refuse_rows(specs[:1], specs[0].dims[1])


def _refuse_own_order(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    if int(attrs["ranks"]) > 2:
        return f"NCCL adds {attrs['ranks']} parts in an order of its own, and rounds at every hop"
    return _refuse_sum(attrs, specs, target)


def _plan_sum(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    return Plan((_call("all_reduce", Pointer("output", 0), specs[0].nbytes),))


def _plan_parts(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    ranks, nbytes = int(attrs["ranks"]), specs[0].nbytes
    gather = _call("all_gather", Pointer("scratch", 0), nbytes)
    add = _kernel("sum_parts", nbytes // VECTOR, target, RANKS=ranks)
    return Plan((gather, add), (Scratch(ranks * nbytes),))


def _refuse_logits(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    columns = specs[0].dims[1]
    return f"{columns} logits do not come in vectors of 4" if columns % 4 else None


def _plan_logits(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    ranks, nbytes, rows = int(attrs["ranks"]), specs[0].nbytes, specs[0].dims[0]
    if rows == 1:  # they lie side by side as they come
        return Plan((_call("all_gather", Pointer("output", 0), nbytes),))
    columns = nbytes // rows // VECTOR
    gather = _call("all_gather", Pointer("scratch", 0), nbytes)
    lay = _kernel("side_by_side", ranks * nbytes // VECTOR, target, RANKS=ranks, COLUMNS=columns)
    return Plan((gather, lay), (Scratch(ranks * nbytes),))


def _cost(attrs: Attrs, specs: Specs, target: Target) -> float:
    others = int(attrs["ranks"]) - 1
    return LATENCY + others * specs[0].nbytes / NETWORK


def _cost_parts(attrs: Attrs, specs: Specs, target: Target) -> float:
    read = int(attrs["ranks"]) * specs[0].nbytes / target.bandwidth
    return _cost(attrs, specs, target) + KERNEL + read


def _in_order(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    return "ranks"  # as every way of one host


SUMS = (
    Tactic("nccl_sum", SOURCE, _refuse_own_order, _plan_sum, _cost, _in_order),
    Tactic("nccl_parts", SOURCE, _refuse_sum, _plan_parts, _cost_parts, _in_order),
)
LOGITS = (Tactic("nccl_gather", SOURCE, _refuse_logits, _plan_logits, _cost_parts),)
