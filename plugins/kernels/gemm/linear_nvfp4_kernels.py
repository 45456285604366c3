"""The CUDA side of `nvfp4_linear` and `int4_linear`: the packed weight; skinny GEMM and stream-K.

Int4 has NVFP4's kernels with another decoder, and as many bytes.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from spark_engine.kernel import Attrs, Pack
from spark_engine.plugins.formats import linear_layout as wt
from spark_engine.plugins.formats.weight_packing import INT4_WORDS, int4_halves, padded
from spark_engine.plugins.kernels.gemm import skinny_gemm
from spark_engine.plugins.kernels.gemm.stream_k import stream_k_gemm as sg
from spark_engine.plugins.kernels.gemm.stream_k import stream_k_schedule as order
from spark_engine.plugins.launch import Candidate, Node
from spark_engine.tensors import Array, DType, TensorSpec

FORM = sg.StreamKForm("nvfp4_linear", "gemm/linear_nvfp4_mma.cu", "x w w_scale w_scale2",
                 weight_bits=4, scale_bytes=64, x_bytes=2)  # fmt: skip
INT4 = dataclasses.replace(FORM, symbol="int4_linear", source="gemm/linear_int4_mma.cu", held=7)


def refuse(node: Node) -> str | None:
    """Refuses f32 activations and ragged weights."""
    if node["x"].dtype is not DType.BF16:
        return f"x is {node['x'].dtype}; only bf16 activations are served"
    return sg.refuse(sg.Problem.of(node, FORM))


def _wide(spec: TensorSpec, per_slab: int, k_each: int) -> TensorSpec:
    n, width = spec.dims
    if not sg.packs(n, width * k_each):
        return spec
    wide = wt.row_width(n, padded(width, per_slab))
    return dataclasses.replace(spec, dtype=DType.U8, shape=(n, wide))


def _packs(codes: Callable[[Array], Array], scales: Callable[[Array], Array]) -> dict[str, Pack]:
    """The layouts of `w` and `w_scale` of a W4A16 format, by how it packs codes and scales."""

    def apply(pack: Callable[[Array], Array], k_each: int) -> Callable[[Attrs, Array], Array]:
        def packed(attrs: Attrs, array: Array) -> Array:
            if not sg.packs(len(array), k_each * array.shape[1]):
                return array
            return wt.as_rows(pack(array), len(array))

        return packed

    return {
        "w": Pack(lambda attrs, spec: _wide(spec, FORM.slab // 2, 2), apply(codes, 2)),
        "w_scale": Pack(lambda attrs, spec: _wide(spec, FORM.slab // 16, 16), apply(scales, 16)),
    }


def _candidates(form: sg.StreamKForm) -> tuple[Candidate, ...]:
    skinny = skinny_gemm.candidate(form, refuse)
    return (skinny, *order.streaming(form, refuse, sg.cost_of(form)))


CANDIDATES = _candidates(FORM)
PACKS = _packs(
    lambda w: wt.pack_fp4(w.view(np.uint8)), lambda scale: wt.pack_scales(scale.view(np.uint8))
)
INT4_CANDIDATES = tuple(
    dataclasses.replace(c, times_of=FORM.symbol, why="as NVFP4: the same bytes and schedule")
    for c in _candidates(INT4)
)
INT4_PACKS = _packs(
    lambda w: wt.pack_fp4(w.view(np.uint8), INT4_WORDS),
    lambda scale: wt.pack_int4_scales(int4_halves(scale.astype(np.float32))),
)
