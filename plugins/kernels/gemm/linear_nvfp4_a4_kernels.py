"""The CUDA side of `nvfp4_linear_a4`: FP4 matrix instructions, emulated where there are none.

Codes count by bytes: the packed weight is `linear_layout`'s of bytes, and `stream_k_gemm`'s k is a
row's bytes. Few rows have a separate kernel over the same layout.
"""

from dataclasses import replace

import numpy as np

from spark_engine.kernel import Attrs, Pack, Target
from spark_engine.plugins.formats import linear_layout as wt
from spark_engine.plugins.formats.weight_packing import padded
from spark_engine.plugins.kernels.gemm import m16_gemm
from spark_engine.plugins.kernels.gemm.stream_k import stream_k_gemm as sg
from spark_engine.plugins.kernels.gemm.stream_k import stream_k_schedule as order
from spark_engine.plugins.launch import Candidate, Node
from spark_engine.tensors import Array, TensorSpec

SLAB = 256  # k of a k-slab
OPERANDS = "xq x_scale w w_scale alpha"
FEW = m16_gemm.Form("nvfp4_linear_a4_m16", OPERANDS, 64, {8: (1, 4), 16: (1, 2), 32: (2, 2)})
SOURCE = "gemm/linear_nvfp4_a4_fp4_sm120.cu"
FORM = sg.StreamKForm("nvfp4_linear_a4", SOURCE, OPERANDS, weight_bits=8, scale_bytes=256,
                 x_bytes=1, x_scale_bytes=16, k="K/2")  # fmt: skip
FP4_RATE = 3.5  # of bf16's
EMULATED_RATE = 0.01
L2_RATE = 5  # of DRAM's


def refuse_few(node: Node) -> str | None:
    """Refuses ragged weights."""
    return m16_gemm.refuse(*node.shape("N", "K"))


def _rate(target: Target) -> float:
    return target.bf16_flops * (FP4_RATE if target.fp4_mma else EMULATED_RATE)


def cost_few(node: Node) -> float:
    """The floor, what each block takes of the activations from L2, and a launch."""
    m, n = node.shape("tokens", "N")
    tiles = next((t for b, (t, _) in FEW.tiles.items() if m <= b), FEW.tiles[32][0])
    fetched = (node["xq"].nbytes + node["x_scale"].nbytes) * -(-n // (wt.M16 * tiles))
    least = m16_gemm.floor(node, _rate(node.target))
    return 1.1 * least + fetched / (L2_RATE * node.target.bandwidth) + 3e-6


def refuse(node: Node) -> str | None:
    """Refuses ragged weights, and k that is no whole k-slabs."""
    k = node.dim("K")
    if k % SLAB:
        return f"k is {k}; scales are copied for {SLAB} at a time: m16 tiles serve it"
    return refuse_few(node)


def cost(node: Node) -> float:
    """1.2 times the floor and a launch."""
    return 1.2 * m16_gemm.floor(node, _rate(node.target)) + 3e-6


def _packs(n: int, k: int) -> bool:
    return m16_gemm.refuse(n, k) is None


def _wide(spec: TensorSpec, k_each: int) -> TensorSpec:
    """`k_each`: k of an element."""
    n, width = spec.dims
    if not _packs(n, width * k_each):
        return spec
    return replace(spec, shape=(n, padded(width, SLAB // k_each)))


def _pack_codes(attrs: Attrs, w: Array) -> Array:
    """`linear_layout`'s bytes: register 2h + r of lane 4g + t is row g + 8r, k 32h + 8t."""
    if not _packs(len(w), 2 * w.shape[1]):
        return w
    return wt.pack_bytes(w.view(np.uint8)).view(w.dtype)


def _pack_scales(attrs: Attrs, w_scale: Array) -> Array:
    if not _packs(len(w_scale), 16 * w_scale.shape[1]):
        return w_scale
    return wt.pack_step_scales(w_scale.view(np.uint8)).view(w_scale.dtype)


CODES = Pack(lambda attrs, spec: _wide(spec, 2), _pack_codes)
SCALES = Pack(lambda attrs, spec: _wide(spec, 16), _pack_scales)
W4A4 = "checkpoints that quantise activations to NVFP4 too"
FEW_ROWS = Candidate(
    "m16 tiles", SOURCE, lambda n: m16_gemm.plan(n, FEW), cost_few, refuse_few, why=W4A4
)
CANDIDATES = (FEW_ROWS, *(replace(c, why=W4A4) for c in order.streaming(FORM, refuse, cost)))
PACKS = {"w": CODES, "w_scale": SCALES}
