"""The CUDA side of `linear`: the packed weight; small n, skinny GEMM and stream-K."""

from dataclasses import replace

from spark_engine.plugins.kernels.gemm import skinny_gemm
from spark_engine.plugins.kernels.gemm.linear_small_n_kernels import SMALL_N
from spark_engine.plugins.kernels.gemm.stream_k import stream_k_gemm as sg
from spark_engine.plugins.kernels.gemm.stream_k import stream_k_schedule as order
from spark_engine.plugins.launch import Node
from spark_engine.tensors import DType

FORM = sg.StreamKForm("linear", "gemm/linear_bf16_mma.cu", "x w",
                 weight_bits=16, scale_bytes=0, x_bytes=2)  # fmt: skip


def refuse(node: Node) -> str | None:
    """Refuses anything but bf16, and ragged weights."""
    for spec in node.specs:
        if spec.dtype is not DType.BF16:
            return f"{spec.name} is {spec.dtype}; only bf16 is served: cast it when lowering"
    return sg.refuse(sg.Problem.of(node, FORM))


SKINNY = skinny_gemm.candidate(FORM, refuse)
STREAM_K, WHOLE = order.streaming(FORM, refuse, sg.cost_of(FORM, 7e-6))
INVARIANT = replace(WHOLE, why="--invariant: one order of prefill's sums without clusters")
CANDIDATES = (SMALL_N, SKINNY, STREAM_K, INVARIANT)
PACKS = {"w": sg.pack(FORM, DType.BF16)}
