"""Which operands of `grouped_moe` are packed in each format (`Format.experts`).

Knows no kernel. How rows are packed is in expert_layout.py.
"""

import dataclasses

import numpy as np

from spark_engine.kernel import Attrs, Pack
from spark_engine.plugins.formats import expert_layout as et
from spark_engine.plugins.formats.format import Format
from spark_engine.plugins.formats.registry import FORMATS
from spark_engine.plugins.formats.weight_packing import padded
from spark_engine.tensors import Array, DType, TensorSpec

_BLOCK_SCALE = 16


def _shape(form: Format, spec: TensorSpec, up: bool, scale: bool) -> tuple[int, int, int]:
    experts, n, width = spec.dims
    each = _BLOCK_SCALE if scale else spec.dtype.itemsize * 8 // int(form.bits)  # k of an element
    return experts, et.rows_of(n, up), padded(width, et.KSLAB // each)


def _packed(form: Format, name: str, spec: TensorSpec) -> bool:
    """Whether an operand is packed: weights of the format's type and scales of blocks with them."""
    experts = form.experts
    if experts is None or name not in ("w13", "w2", "w13_scale", "w2_scale"):
        return False
    if name.endswith("_scale"):
        return experts.pack_scales is not None and spec.dtype is not DType.U8
    whole = experts.pack_scales is not None or spec.dims[2] % 16 == 0
    return spec.dtype is experts.dtype and whole


def _pack(name: str) -> Pack:
    """The pack of an operand, whatever it is in a format."""
    up, scale = name.startswith("w13"), name.endswith("_scale")

    def infer(attrs: Attrs, spec: TensorSpec) -> TensorSpec:
        form = FORMATS[str(attrs["format"])]
        if not _packed(form, name, spec):
            return spec
        shape = _shape(form, spec, up, scale)
        return dataclasses.replace(spec, dtype=DType.U8 if scale else spec.dtype, shape=shape)

    def apply(attrs: Attrs, array: Array) -> Array:
        form, spec = (
            FORMATS[str(attrs["format"])],
            TensorSpec(name, DType.of(array.dtype), array.shape),
        )
        if form.experts is None or not _packed(form, name, spec):
            return array
        pack = form.experts.pack_scales if scale else form.experts.pack
        assert pack is not None
        out = np.empty(_shape(form, spec, up, scale), np.uint8 if scale else array.dtype)
        for packed, rows in zip(out, array, strict=True):
            whole = np.ascontiguousarray(et.arranged(rows, up))
            packed[...] = pack(whole.view(np.uint8)).view(out.dtype)
        return out

    return Pack(infer, apply, "grouped_moe", ("format",))


PACKS = {name: _pack(name) for name in ("w13", "w13_scale", "w13_scale2", "w2", "w2_scale")}
