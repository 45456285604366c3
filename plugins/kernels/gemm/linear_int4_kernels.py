"""The CUDA side of `int4_linear`: NVFP4's kernels with another decoder, and as many bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from spark_engine.plugins.formats import linear_layout as wt
from spark_engine.plugins.formats.weight_packing import INT4_WORDS, int4_halves
from spark_engine.plugins.kernels.gemm import linear_nvfp4_kernels as nvfp4
from spark_engine.plugins.kernels.gemm import skinny_gemm
from spark_engine.plugins.kernels.gemm.stream_k import stream_k_gemm as sg
from spark_engine.plugins.kernels.gemm.stream_k import stream_k_schedule as order

FORM = sg.StreamKForm("int4_linear", "gemm/linear_int4_mma.cu", "x w w_scale w_scale2",
                 weight_bits=4, scale_bytes=64, x_bytes=2)  # fmt: skip

CANDIDATES = tuple(
    replace(candidate, times_of=nvfp4.FORM.symbol, why="as NVFP4: the same bytes and schedule")
    for candidate in (
        skinny_gemm.candidate(FORM, nvfp4.refuse),
        *order.streaming(FORM, nvfp4.refuse, sg.cost_of(FORM)),
    )
)
PACKS = nvfp4.packs(
    lambda w: wt.pack_fp4(w.view(np.uint8), INT4_WORDS),
    lambda scale: wt.pack_int4_scales(int4_halves(scale.astype(np.float32))),
)
