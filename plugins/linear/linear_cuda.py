"""The CUDA side of `linear`: the packed weight; small n, skinny GEMM and stream-K."""

from __future__ import annotations

import dataclasses

import numpy as np

from spark_engine.kernel import Attrs, Cuda, Pack, Plan, Specs, Tactic, Target
from spark_engine.plugins.common.weight_packing import padded
from spark_engine.plugins.linear import skinny_gemm
from spark_engine.plugins.linear import stream_k_gemm as sg
from spark_engine.plugins.linear import stream_k_schedule as order
from spark_engine.plugins.linear import weight_layout as wt
from spark_engine.plugins.linear.linear_small_n_cuda import SMALL_N
from spark_engine.tensors import Array, DType, TensorSpec

FORM = sg.Format("linear", weight_bits=16, scale_bytes=0, x_bytes=2)


def problem(attrs: Attrs, specs: Specs) -> sg.Problem:
    """m, n, k of the node."""
    x, w = specs
    return sg.Problem(x.dims[0], w.dims[0], x.dims[1])


def refuse(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """Refuses anything but bf16, and ragged weights."""
    for spec in specs:
        if spec.dtype is not DType.BF16:
            return f"{spec.name} is {spec.dtype}; only bf16 is served: cast it when lowering"
    return sg.refuse(problem(attrs, specs))


def plan(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    """One launch."""
    p = problem(attrs, specs)
    return sg.plan(sg.choose(p, FORM, target), p, FORM, target, (0, 1), str(attrs["dtype"]))


def large(attrs: Attrs, specs: Specs, target: Target) -> Plan | None:
    """The same in large tiles, whole."""
    p, dtype = problem(attrs, specs), str(attrs["dtype"])
    return sg.plan_large(p, FORM, target, (0, 1), dtype)


def cost(attrs: Attrs, specs: Specs, target: Target) -> float:
    """1.2 times the floor, and what start, fix-up and epilogue take."""
    return 1.2 * sg.floor(problem(attrs, specs), FORM, target, str(attrs["dtype"])) + 7e-6


def _infer(attrs: Attrs, spec: TensorSpec) -> TensorSpec:
    n, k = spec.dims
    if spec.dtype is not DType.BF16 or not sg.packs(n, k):
        return spec
    return dataclasses.replace(spec, shape=(n, wt.row_width(n, padded(k, FORM.slab))))


def _apply(attrs: Attrs, w: Array) -> Array:
    if w.dtype != DType.BF16.numpy or not sg.packs(*w.shape):
        return w
    return wt.as_rows(wt.pack_bytes(w.view(np.uint8)).view(w.dtype), len(w))


SKINNY = skinny_gemm.tactic(FORM, (0, 1), problem, refuse)

CUDA = Cuda(
    tactics=(
        SMALL_N,
        SKINNY,
        *order.streaming(Tactic("stream-k", "linear/linear.cu", refuse, plan, cost), large),
    ),
    packs={1: Pack(_infer, _apply)},
)
