"""The CUDA side of `fp8_linear`: the packed weight; skinny GEMM and stream-K.

Hopper's wgmma sums e4m3 products to some 13 bits: f32 results go without it.
"""

from spark_engine.plugins.kernels.gemm import skinny_gemm
from spark_engine.plugins.kernels.gemm.stream_k import stream_k_gemm as sg
from spark_engine.plugins.kernels.gemm.stream_k import stream_k_schedule as order
from spark_engine.plugins.launch import Node
from spark_engine.tensors import DType

FORM = sg.StreamKForm("fp8_linear", "gemm/linear_fp8_mma.cu", "xq w x_scale w_scale",
                 weight_bits=8, scale_bytes=0, x_bytes=1)  # fmt: skip


def refuse(node: Node) -> str | None:
    """Refuses ragged weights."""
    return sg.refuse(sg.Problem.of(node, FORM))


SKINNY = skinny_gemm.candidate(FORM, refuse)
CANDIDATES = (SKINNY, *order.streaming(FORM, refuse, sg.cost_of(FORM), exact=True))
PACKS = {"w": sg.pack(FORM, DType.F8E4M3)}
