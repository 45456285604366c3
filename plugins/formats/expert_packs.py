"""Which operands of `grouped_moe` are packed, in each format; how is expert_layout's.

Knows the order of the operands (docs/graph.md) and no kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from spark_engine.kernel import Attrs, Pack
from spark_engine.plugins.formats import expert_layout as et
from spark_engine.plugins.formats.weight_packing import padded
from spark_engine.tensors import Array, DType, TensorSpec

# Params by format.
OPERANDS: Mapping[str, tuple[str, ...]] = {
    "dense": ("w13", "w2"),
    "nvfp4": ("w13", "w13_scale", "w13_scale2", "w2", "w2_scale", "w2_scale2"),
    "nvfp4_a4": (
        *("w13", "w13_scale", "w13_scale2", "w2", "w2_scale", "w2_scale2"),
        *("x_scale", "h_scale"),
    ),
    "fp8": ("w13", "w13_scale", "w2", "w2_scale", "x_scale", "h_scale"),
    "fp8_block": ("w13", "w13_scale", "w2", "w2_scale"),
}
# k that a byte or element of a packed row holds.
_WIDTH = {"dense": 1, "nvfp4": 2, "nvfp4_a4": 2, "fp8": 1, "fp8_block": 1}
_BLOCK_SCALE = 16


def _shape(kind: str, dims: tuple[int, ...], up: bool, scale: bool) -> tuple[int, int, int]:
    experts, n, width = dims
    each = et.KSLAB // (_BLOCK_SCALE if scale else _WIDTH[kind])
    return experts, et.rows_of(n, up), padded(width, each)


def _apply(kind: str, array: Array, up: bool, scale: bool) -> Array:
    pack = et.pack_scales if scale else et.pack_codes
    if kind == "dense":
        pack = et.pack_dense
    elif kind.startswith("fp8"):
        pack = et.pack_fp8
    out = np.empty(_shape(kind, array.shape, up, scale), np.uint8 if scale else array.dtype)
    for packed, rows in zip(out, array, strict=True):
        whole = np.ascontiguousarray(et.arranged(rows, up))
        packed[...] = pack(whole.view(np.uint8)).view(out.dtype)
    return out


def _packed(kind: str, name: str, spec: TensorSpec) -> bool:
    """Whether an operand is packed: weights of the format's type and NVFP4's block scales."""
    fp4 = kind.startswith("nvfp4")
    if name.endswith("_scale"):
        return fp4 and name in ("w13_scale", "w2_scale") and spec.dtype is DType.F8E4M3
    if name not in ("w13", "w2"):
        return False
    want = DType.U8 if fp4 else DType.BF16 if kind == "dense" else DType.F8E4M3
    return spec.dtype is want and (fp4 or spec.dims[2] % 16 == 0)


def _pack(name: str) -> Pack:
    """The pack of an operand, whatever it is in a format."""
    scale = name.endswith("_scale")

    def infer(attrs: Attrs, spec: TensorSpec) -> TensorSpec:
        kind = str(attrs["format"])
        if not _packed(kind, name, spec):
            return spec
        shape = _shape(kind, spec.dims, name.startswith("w13"), scale)
        return dataclasses.replace(spec, dtype=DType.U8 if scale else spec.dtype, shape=shape)

    def apply(attrs: Attrs, array: Array) -> Array:
        kind = str(attrs["format"])
        if not _packed(kind, name, TensorSpec(name, DType.of(array.dtype), array.shape)):
            return array
        return _apply(kind, array, name.startswith("w13"), scale)

    return Pack(infer, apply)


PACKS = {name: _pack(name) for name in ("w13", "w13_scale", "w13_scale2", "w2", "w2_scale")}
