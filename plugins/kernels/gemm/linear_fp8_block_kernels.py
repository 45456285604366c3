"""The CUDA side of `fp8_block_linear`: the packed weight; skinny GEMM and stream-K.

Hopper's wgmma sums e4m3 products to some 13 bits, within a block of 128: f32 results go without it.
"""

from dataclasses import replace

from spark_engine.plugins.kernels.gemm import skinny_gemm
from spark_engine.plugins.kernels.gemm.stream_k import stream_k_gemm as sg
from spark_engine.plugins.kernels.gemm.stream_k import stream_k_schedule as order
from spark_engine.plugins.launch import Node
from spark_engine.tensors import DType

FORM = sg.StreamKForm("fp8_block_linear", "gemm/linear_fp8_block_mma.cu", "xq x_scale w w_scale",
                 weight_bits=8, scale_bytes=0, x_bytes=1, x_scale_bytes=4)  # fmt: skip


def refuse(node: Node) -> str | None:
    """Refuses ragged weights."""
    return sg.refuse(sg.Problem.of(node, FORM))


SKINNY = skinny_gemm.candidate(FORM, refuse)
WHY = "checkpoints with FP8 in blocks of 128 x 128, which no recorded bucket has"
STREAMING = order.streaming(FORM, refuse, sg.cost_of(FORM), exact=True)
CANDIDATES = tuple(replace(c, why=WHY) for c in (SKINNY, *STREAMING))
PACKS = {"w": sg.pack(FORM, DType.F8E4M3)}
