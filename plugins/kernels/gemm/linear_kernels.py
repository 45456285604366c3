"""The kernels of the linear ops by weight format, and how they pack a weight.

Only the CPU serves a format that is missing here.
"""

from collections.abc import Mapping

from spark_engine.kernel import Pack
from spark_engine.plugins.kernels.gemm import (
    linear_bf16_kernels,
    linear_fp8_block_kernels,
    linear_fp8_kernels,
    linear_nvfp4_a4_kernels,
    linear_nvfp4_kernels,
)
from spark_engine.plugins.launch import Candidate

SERVED: Mapping[str, tuple[tuple[Candidate, ...], Mapping[str, Pack]]] = {
    "dense": (linear_bf16_kernels.CANDIDATES, linear_bf16_kernels.PACKS),
    "fp8": (linear_fp8_kernels.CANDIDATES, linear_fp8_kernels.PACKS),
    "fp8_block": (linear_fp8_block_kernels.CANDIDATES, linear_fp8_block_kernels.PACKS),
    "nvfp4": (linear_nvfp4_kernels.CANDIDATES, linear_nvfp4_kernels.PACKS),
    "nvfp4_a8": (linear_nvfp4_kernels.A8_CANDIDATES, linear_nvfp4_kernels.PACKS),
    "nvfp4_a4": (linear_nvfp4_a4_kernels.CANDIDATES, linear_nvfp4_a4_kernels.PACKS),
    "int4": (linear_nvfp4_kernels.INT4_CANDIDATES, linear_nvfp4_kernels.INT4_PACKS),
}
