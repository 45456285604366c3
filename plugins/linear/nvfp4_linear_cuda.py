"""The CUDA side of `nvfp4_linear`: the packed weight; skinny GEMM and stream-K."""

from __future__ import annotations

import dataclasses

import numpy as np

from spark_engine.kernel import Attrs, Cuda, Pack, Plan, Specs, Tactic, Target
from spark_engine.plugins.common.weight_packing import padded
from spark_engine.plugins.linear import skinny_gemm
from spark_engine.plugins.linear import stream_k_gemm as sg
from spark_engine.plugins.linear import stream_k_schedule as order
from spark_engine.plugins.linear import weight_layout as wt
from spark_engine.tensors import Array, DType, TensorSpec

FORM = sg.Format("nvfp4_linear", weight_bits=4, scale_bytes=64, x_bytes=2)


def problem(attrs: Attrs, specs: Specs) -> sg.Problem:
    """m, n, k of the node."""
    x, _, _, w_scale2 = specs
    return sg.Problem(x.dims[0], w_scale2.dims[0], x.dims[1])


def refuse(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """Refuses f32 activations and ragged weights."""
    if specs[0].dtype is not DType.BF16:
        return f"x is {specs[0].dtype}; only bf16 activations are served"
    return sg.refuse(problem(attrs, specs))


def plan(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    """One launch."""
    p = problem(attrs, specs)
    return sg.plan(sg.choose(p, FORM, target), p, FORM, target, (0, 1, 2, 3), str(attrs["dtype"]))


def large(attrs: Attrs, specs: Specs, target: Target) -> Plan | None:
    """The same in large tiles, whole."""
    p, dtype = problem(attrs, specs), str(attrs["dtype"])
    return sg.plan_large(p, FORM, target, (0, 1, 2, 3), dtype)


def cost(attrs: Attrs, specs: Specs, target: Target) -> float:
    """1.2 times the floor and a launch."""
    return 1.2 * sg.floor(problem(attrs, specs), FORM, target, str(attrs["dtype"])) + 3e-6


def _wide(spec: TensorSpec, per_slab: int, k_each: int) -> TensorSpec:
    n, width = spec.dims
    if not sg.packs(n, width * k_each):
        return spec
    wide = wt.row_width(n, padded(width, per_slab))
    return dataclasses.replace(spec, dtype=DType.U8, shape=(n, wide))


def _pack_codes(attrs: Attrs, w: Array) -> Array:
    codes = w.view(np.uint8)
    return wt.as_rows(wt.pack_fp4(codes), len(w)) if sg.packs(len(w), 2 * w.shape[1]) else codes


def _pack_scales(attrs: Attrs, w_scale: Array) -> Array:
    if not sg.packs(len(w_scale), 16 * w_scale.shape[1]):
        return w_scale
    return wt.as_rows(wt.pack_scales(w_scale.view(np.uint8)), len(w_scale))


CODES = Pack(lambda attrs, spec: _wide(spec, FORM.slab // 2, 2), _pack_codes)
SCALES = Pack(lambda attrs, spec: _wide(spec, FORM.slab // 16, 16), _pack_scales)

SKINNY = skinny_gemm.tactic(FORM, (0, 1, 2, 3), problem, refuse)

CUDA = Cuda(
    tactics=(
        SKINNY,
        *order.streaming(Tactic("stream-k", "linear/nvfp4_linear.cu", refuse, plan, cost), large),
    ),
    packs={1: CODES, 2: SCALES},
)
