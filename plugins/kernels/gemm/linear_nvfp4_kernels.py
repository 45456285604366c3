"""The CUDA side of `nvfp4_linear`, `nvfp4_linear_a8` and `int4_linear`: the packed weight; skinny
GEMM and stream-K.

Int4 has NVFP4's kernels with another decoder, and as many bytes. With FP8 activations (A8) a k-slab
has two of the packed ones, decoded to e4m3; few rows have nothing to gain by it.
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
A8 = sg.StreamKForm("nvfp4_linear_a8", FORM.source, "xq x_scale w w_scale w_scale2", weight_bits=4,
                 scale_bytes=128, x_bytes=1, table_bytes=4096,
                 more=lambda node: {"A8": 1, "BY_TOKEN": 1})  # fmt: skip
INT4 = dataclasses.replace(FORM, symbol="int4_linear", source="gemm/linear_int4_mma.cu", held=7)


def refuse(node: Node) -> str | None:
    """Refuses f32 activations and ragged weights."""
    if node["x"].dtype is not DType.BF16:
        return f"x is {node['x'].dtype}; only bf16 activations are served"
    return sg.refuse(sg.Problem.of(node, FORM))


def refuse_a8(node: Node) -> str | None:
    """Refuses f32 results, which Hopper's short sums of e4m3 would not be, and ragged weights."""
    if node.text("dtype") != "bf16":
        return f"dtype is {node.text('dtype')}; only bf16 results are served"
    if node.dim("K") % A8.slab:
        return f"k is {node.dim('K')}, not a multiple of {A8.slab}: --mlp-activations bf16"
    return None


def _wide(spec: TensorSpec, per_slab: int, k_each: int) -> TensorSpec:
    n, width = spec.dims
    if not sg.packs(n, width * k_each):
        return spec
    wide = wt.row_width(n, padded(width, per_slab))
    return dataclasses.replace(spec, dtype=DType.U8, shape=(n, wide))


def _packs(
    codes: Callable[[Array], Array], scales: Callable[[Array], Array], op: str = ""
) -> dict[str, Pack]:
    """The layouts of `w` and `w_scale` of a W4A16 format, by how it packs codes and scales."""

    def apply(pack: Callable[[Array], Array], k_each: int) -> Callable[[Attrs, Array], Array]:
        def packed(attrs: Attrs, array: Array) -> Array:
            if not sg.packs(len(array), k_each * array.shape[1]):
                return array
            return wt.as_rows(pack(array), len(array))

        return packed

    return {
        "w": Pack(lambda attrs, spec: _wide(spec, FORM.slab // 2, 2), apply(codes, 2), op),
        "w_scale": Pack(
            lambda attrs, spec: _wide(spec, FORM.slab // 16, 16), apply(scales, 16), op
        ),
    }


def _candidates(form: sg.StreamKForm) -> tuple[Candidate, ...]:
    skinny = skinny_gemm.candidate(form, refuse)
    return (skinny, *order.streaming(form, refuse, sg.cost_of(form)))


CANDIDATES = _candidates(FORM)
PACKS = _packs(
    lambda w: wt.pack_fp4(w.view(np.uint8)),
    lambda scale: wt.pack_scales(scale.view(np.uint8)),
    FORM.symbol,
)
A8_CANDIDATES = tuple(
    dataclasses.replace(c, why="builds with --mlp-activations fp8")
    for c in order.streaming(A8, refuse_a8, sg.cost_of(A8))
)
INT4_CANDIDATES = tuple(
    dataclasses.replace(c, times_of=FORM.symbol, why="as NVFP4: the same bytes and schedule")
    for c in _candidates(INT4)
)
INT4_PACKS = _packs(
    lambda w: wt.pack_fp4(w.view(np.uint8), INT4_WORDS),
    lambda scale: wt.pack_int4_scales(int4_halves(scale.astype(np.float32))),
)
