"""The CUDA side of `linear_bias`: stream-K's bf16 kernels with a bias, gelu and a residual."""

from dataclasses import replace

from spark_engine.kernel import Attrs
from spark_engine.plugins.kernels.gemm.stream_k import stream_k_gemm as sg
from spark_engine.plugins.kernels.gemm.stream_k import stream_k_schedule as order
from spark_engine.plugins.launch import Macros, Node
from spark_engine.tensors import DType

GELUS = ("", "tanh", "erf")


def _macros(node: Node) -> Macros:
    return {"GELU": GELUS.index(node.text("gelu")), "RESIDUAL": "residual" in node}


FORM = sg.StreamKForm("linear_bias", "gemm/linear_bf16_mma.cu", "x w bias residual?",
                 weight_bits=16, scale_bytes=0, x_bytes=2, more=_macros)  # fmt: skip


def whole(attrs: Attrs) -> Attrs:
    """The attributes that kernels of linear layers have."""
    return {**attrs, "dtype": "bf16", "by_token": 0}


def _refuse(node: Node) -> str | None:
    """Refuses anything but bf16, and ragged weights."""
    for name in ("x", "w", "residual"):
        if name in node and node[name].dtype is not DType.BF16:
            return f"{node[name].name} is {node[name].dtype}; only bf16 is served"
    return sg.refuse(sg.Problem.of(node, FORM))


# Estimates: neither was measured.
STREAM_K, WHOLE = order.streaming(FORM, _refuse, sg.cost_of(FORM, 7e-6))
CANDIDATES = (
    replace(STREAM_K, why="pieces are equal where whole tiles leave multiprocessors idle"),
    replace(WHOLE, why="--invariant, and where there are many tiles for each multiprocessor"),
)
PACKS = {"w": sg.pack(FORM, DType.BF16)}
