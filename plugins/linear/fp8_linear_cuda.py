"""The CUDA side of `fp8_linear`: the packed weight; skinny GEMM and stream-K."""

from __future__ import annotations

import dataclasses

import numpy as np

from spark_engine.kernel import Attrs, Cuda, Pack, Plan, Specs, Tactic, Target
from spark_engine.plugins.common.weight_packing import padded
from spark_engine.plugins.linear import skinny_gemm
from spark_engine.plugins.linear import stream_k_gemm as sg
from spark_engine.plugins.linear import stream_k_schedule as order
from spark_engine.plugins.linear import weight_layout as wt
from spark_engine.tensors import Array, TensorSpec

FORM = sg.Format("fp8_linear", weight_bits=8, scale_bytes=0, x_bytes=1)


def problem(attrs: Attrs, specs: Specs) -> sg.Problem:
    """m, n, k of the node."""
    return sg.Problem(specs[0].dims[0], specs[3].dims[0], specs[0].dims[1])


def refuse(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """Refuses ragged weights."""
    return sg.refuse(problem(attrs, specs))


def plan(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    """One launch. Hopper's wgmma sums e4m3 products to some 13 bits: f32 results go without it."""
    p, dtype = problem(attrs, specs), str(attrs["dtype"])
    tile = sg.choose(p, FORM, target)
    if dtype == "f32" and tile.wgmma:
        tile = sg.fill(dataclasses.replace(tile, wgmma=False), p, FORM, target)
    return sg.plan(tile, p, FORM, target, (0, 1, 2, 3), dtype)


def large(attrs: Attrs, specs: Specs, target: Target) -> Plan | None:
    """The same in large tiles, whole."""
    p, dtype = problem(attrs, specs), str(attrs["dtype"])
    return None if dtype == "f32" else sg.plan_large(p, FORM, target, (0, 1, 2, 3), dtype)


def cost(attrs: Attrs, specs: Specs, target: Target) -> float:
    """1.2 times the floor and a launch."""
    return 1.2 * sg.floor(problem(attrs, specs), FORM, target, str(attrs["dtype"])) + 3e-6


def _infer(attrs: Attrs, spec: TensorSpec) -> TensorSpec:
    n, k = spec.dims
    if not sg.packs(n, k):
        return spec
    return dataclasses.replace(spec, shape=(n, wt.row_width(n, padded(k, FORM.slab))))


def _apply(attrs: Attrs, w: Array) -> Array:
    if not sg.packs(*w.shape):
        return w
    return wt.as_rows(wt.pack_bytes(w.view(np.uint8)).view(w.dtype), len(w))


SKINNY = skinny_gemm.tactic(FORM, (0, 1, 2, 3), problem, refuse)

CUDA = Cuda(
    tactics=(
        SKINNY,
        *order.streaming(Tactic("stream-k", "linear/fp8_linear.cu", refuse, plan, cost), large),
    ),
    packs={1: Pack(_infer, _apply)},
)
