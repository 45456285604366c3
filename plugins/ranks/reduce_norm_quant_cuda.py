"""The CUDA side of `reduce_norm_quant`: the sum over ranks and the norm in one launch, or in two.

`one_shot` and `push` are one launch of reduce_norm.cu; `<way>_apart` are the launches of all_reduce
and of norm_quant, one after the other. Sums and norm keep the order that they have in the two ops,
so that all of them give the same bits.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from spark_engine.kernel import (
    NULL,
    Arg,
    Attrs,
    Cuda,
    Early,
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
from spark_engine.plugins.ranks import collectives_cuda as collectives
from spark_engine.plugins.rowwise import norm_quant, norm_quant_cuda

X, WEIGHT, RESIDUAL, SCALES = range(4)
JOINED = (collectives.PUSH, collectives.ONE_SHOT)
(NORM,) = norm_quant.OP.cuda.tactics


def _norm(attrs: Attrs) -> Attrs:
    """norm_quant's."""
    return {"add": 1, **{name: attrs[name] for name in ("eps", "keep", "quant", "n")}}


def _refuse(attrs: Attrs, specs: Specs, target: Target, way: str) -> str | None:
    reason = collectives.refuse_way(way, int(attrs["ranks"]), specs[X].nbytes)
    return reason or NORM.refuse(_norm(attrs), specs, target)


def _plan(attrs: Attrs, specs: Specs, target: Target, way: str) -> Plan:
    ranks, keep = int(attrs["ranks"]), int(attrs["keep"])
    rows, k = specs[X].dims
    threads, vectors = norm_quant_cuda.threads_of(k)
    args: tuple[Arg, ...] = (
        Pointer("input", X),
        Pointer("input", WEIGHT),
        Pointer("input", RESIDUAL),
        Pointer("input", SCALES) if rq.takes_scales(attrs) else NULL,
        Pointer("output", keep),
        *rq.outputs(attrs, keep + 1),
        Scalar("i32", rows),
        *collectives.where(ranks),
    )
    numbers = {"THREADS": threads, "VECS": vectors, "RANKS": ranks}
    numbers |= {"WAY": collectives.WAYS.index(way)}
    defines = rq.old_defines(attrs, k, **numbers, EPS=float(attrs["eps"]))
    blocks = min(rows, target.sms, collectives.MOST_BLOCKS)
    launch = Launch(
        "reduce_norm", (blocks, 1, 1), (threads, 1, 1), args, 0, (1, 1, 1), defines, True,
        resident=ranks > 1, early=Early(begins=True, lets=True),
    )  # fmt: skip
    return Plan((launch,), symmetric=collectives.symmetric(way, ranks, specs[X].nbytes))


def _cost(attrs: Attrs, specs: Specs, target: Target, way: str) -> float:
    """The exchange, and what the norm's launch moves and takes."""
    ranks, nbytes = int(attrs["ranks"]), specs[X].nbytes
    alone = NORM.cost(_norm(attrs), specs, target)
    waves = -(-specs[X].dims[0] // target.sms)  # rows of a block, one after the other
    slower = (waves - 1) * rq.LAUNCH_SECONDS / 2
    return collectives.exchange_seconds(way, ranks, nbytes) + alone + slower


def _refuse_apart(attrs: Attrs, specs: Specs, target: Target, total: Tactic) -> str | None:
    reason = total.refuse(attrs, specs[:1], target)
    return reason or NORM.refuse(_norm(attrs), specs, target)


def _plan_apart(attrs: Attrs, specs: Specs, target: Target, total: Tactic) -> Plan:
    y = Pointer("scratch", 0)
    first = total.plan(attrs, specs[:1], target)
    last = NORM.plan(_norm(attrs), specs, target)
    launches = [_moved(launch, Pointer("output", 0), y, total) for launch in first.launches]
    launches += [_moved(launch, Pointer("input", X), y, NORM) for launch in last.launches]
    return Plan(tuple(launches), (Scratch(specs[X].nbytes),), first.symmetric)


def _moved(launch: Launch, at: Pointer, to: Pointer, tactic: Tactic) -> Launch:
    """With what lay at `at` at `to`."""
    args = tuple(to if arg == at else arg for arg in launch.args)
    return replace(launch, args=args, source=launch.source or tactic.source)


def _cost_apart(attrs: Attrs, specs: Specs, target: Target, total: Tactic) -> float:
    norm = NORM.cost(_norm(attrs), specs, target)
    return total.cost(attrs, specs[:1], target) + rq.LAUNCH_SECONDS + norm


def _order(attrs: Attrs, specs: Specs, target: Target) -> str:
    return collectives.ORDER


def _joined(way: str) -> Tactic:
    return Tactic(
        way,
        "ranks/reduce_norm.cu",
        partial(_refuse, way=way),
        partial(_plan, way=way),
        partial(_cost, way=way),
        _order,
    )


def _apart(total: Tactic) -> Tactic:
    return Tactic(
        f"{total.name}_apart",
        total.source,
        partial(_refuse_apart, total=total),
        partial(_plan_apart, total=total),
        partial(_cost_apart, total=total),
        _order,
    )


CUDA = Cuda((*(_joined(way) for way in JOINED), *(_apart(t) for t in collectives.SUMS)))
