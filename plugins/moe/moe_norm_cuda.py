"""The CUDA side of `moe_norm_quant`: the tactics of `grouped_moe`, whose end becomes the norm.

A tactic that ends in `moe_combine` gets one launch of moe_norm.cu in its place; one that writes y
itself, or has many tokens, is followed by norm_quant. Every sum keeps the order that it has in the
two ops, so that fused and unfused give the same bits. Knows no other kernel of the experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from spark_engine.kernel import (
    NULL,
    Arg,
    Attrs,
    Cuda,
    Launch,
    Plan,
    Pointer,
    Scratch,
    Specs,
    Tactic,
    Target,
)
from spark_engine.plugins.common import row_quant_cuda as rq
from spark_engine.plugins.moe import grouped_moe_cuda, moe_packs
from spark_engine.plugins.rowwise import norm_quant, norm_quant_cuda

FIRST = 5  # operands before the experts' params: x, ids, weights, residual, norm_weight
RESIDUAL, WEIGHT = 3, 4
COMBINE = "moe_combine"  # the launch that is replaced: (ids, weights, parts, y)
ROWS = 2  # of a multiprocessor, up to which one launch is faster than two
SOURCE = "moe/moe_norm.cu"


def _experts(attrs: Attrs, specs: Specs) -> tuple[Attrs, Specs]:
    """The node of grouped_moe."""
    end = FIRST + len(moe_packs.OPERANDS[str(attrs["format"])])
    own: Attrs = {name: attrs[name] for name in ("format", "dtype")}
    return own, (*specs[:3], *specs[FIRST:end])


def _norm(attrs: Attrs, specs: Specs) -> tuple[Attrs, Specs]:
    """The node of norm_quant: over y, the norm's weight, the residual, scales."""
    own: Attrs = {"add": 1, **{name: attrs[name] for name in ("eps", "keep", "quant", "n")}}
    scales = specs[-1:] if rq.takes_scales(attrs) else ()
    return own, (specs[RESIDUAL], specs[WEIGHT], specs[RESIDUAL], *scales)


def _refuse(attrs: Attrs, specs: Specs, target: Target, experts: Tactic) -> str | None:
    (norm,) = norm_quant.OP.cuda.tactics
    reason = experts.refuse(*_experts(attrs, specs), target)
    return reason or norm.refuse(*_norm(attrs, specs), target)


def _plan(attrs: Attrs, specs: Specs, target: Target, experts: Tactic) -> Plan:
    plan = experts.plan(*_experts(attrs, specs), target)
    y = Pointer("scratch", len(plan.scratch))
    moved = partial(_of_experts, y=y)
    launches = [_moved(launch, moved, experts.source) for launch in plan.launches]
    if _joins(specs, target, plan):
        launches[-1] = _sum_and_norm(attrs, specs, plan.launches[-1])
        return Plan(tuple(launches), plan.scratch)
    (norm,) = norm_quant.OP.cuda.tactics
    inner = norm.plan(*_norm(attrs, specs), target)
    at = partial(_of_norm, y=y, scales=len(specs) - 1)
    launches += [_moved(launch, at, norm.source) for launch in inner.launches]
    return Plan(tuple(launches), (*plan.scratch, Scratch(specs[RESIDUAL].nbytes)))


def _joins(specs: Specs, target: Target, plan: Plan) -> bool:
    """Whether the experts end in one launch over few tokens, which the norm joins."""
    ends = [launch.symbol == COMBINE for launch in plan.launches]
    return ends[-1] and sum(ends) == 1 and specs[0].dims[0] <= ROWS * target.sms


def _of_experts(pointer: Pointer, y: Pointer) -> Pointer:
    """Where grouped_moe's operand lies here."""
    if pointer.kind == "output":
        return y
    late = pointer.kind == "input" and pointer.index >= moe_packs.FIRST
    return replace(pointer, index=pointer.index + FIRST - moe_packs.FIRST) if late else pointer


def _of_norm(pointer: Pointer, y: Pointer, scales: int) -> Pointer:
    """Where norm_quant's operand lies here."""
    if pointer.kind != "input":
        return pointer
    return (y, Pointer("input", WEIGHT), Pointer("input", RESIDUAL), Pointer("input", scales))[
        pointer.index
    ]


def _moved(launch: Launch, at: Callable[[Pointer], Pointer], source: str) -> Launch:
    args = tuple(at(a) if isinstance(a, Pointer) else a for a in launch.args)
    return replace(launch, args=args, source=launch.source or source)


def _sum_and_norm(attrs: Attrs, specs: Specs, combine: Launch) -> Launch:
    """moe_norm in the place of moe_combine."""
    ids, weights, parts, _ = combine.args
    k, keep = specs[0].dims[1], int(attrs["keep"])
    threads, vectors = norm_quant_cuda.threads_of(k)
    args: tuple[Arg, ...] = (
        *(ids, weights, parts),
        Pointer("input", RESIDUAL),
        Pointer("input", WEIGHT),
        Pointer("input", len(specs) - 1) if rq.takes_scales(attrs) else NULL,
        Pointer("output", keep),
        *rq.outputs(attrs, keep + 1),
    )
    numbers = {"THREADS": threads, "VECS": vectors, "K1": specs[1].dims[1]}
    defines = rq.old_defines(attrs, k, **numbers, EPS=float(attrs["eps"]))
    block = (threads, 1, 1)
    return Launch("moe_norm", combine.grid, block, args, defines=defines, pdl=True,
                  source=SOURCE)  # fmt: skip


def _cost(attrs: Attrs, specs: Specs, target: Target, experts: Tactic) -> float:
    """That of the experts, and what the norm moves; a launch where it is one of its own."""
    own, inner = _experts(attrs, specs)
    (norm,) = norm_quant.OP.cuda.tactics
    joined = _joins(specs, target, experts.plan(own, inner, target))
    more = norm.cost(*_norm(attrs, specs), target)
    return experts.cost(own, inner, target) + more - joined * rq.LAUNCH_SECONDS


def _reduction_key(attrs: Attrs, specs: Specs, target: Target, experts: Tactic) -> str | None:
    return experts.reduction_key(*_experts(attrs, specs), target)


def _tactic(experts: Tactic) -> Tactic:
    refuse, plan = partial(_refuse, experts=experts), partial(_plan, experts=experts)
    cost, key = partial(_cost, experts=experts), partial(_reduction_key, experts=experts)
    return Tactic(experts.name, experts.source, refuse, plan, cost, key)


CUDA = Cuda(
    tactics=tuple(_tactic(t) for t in grouped_moe_cuda.CUDA.tactics),
    packs=moe_packs.PACKS,
)
