"""Unquantised weights, in the checkpoint's dtype. The CPU widens them to f32 when it loads them."""

import numpy as np

from spark_engine.operand import Operand, Role
from spark_engine.plugins.common import operands
from spark_engine.plugins.formats import expert_layout
from spark_engine.plugins.formats.format import ExpertKernels, Format
from spark_engine.tensors import DType

FORMAT = Format(
    name="dense",
    op="linear",
    operands=(operands.x(), Operand("w", Role.WEIGHT, "W[N,K]", joins=1)),
    bits=16,
    quantise=lambda w: (w.astype(DType.BF16.numpy),),
    decode=lambda v: v["w"].astype(np.float64),
    decode_body=lambda f, v, shape: v["w"],
    experts=ExpertKernels(0, 0, DType.BF16, expert_layout.pack_dense),
    weights=(DType.F32, DType.F16, DType.BF16, DType.BF16, DType.BF16),
    linear_sizes={
        DType.F32: ((1, 64, 48), (3, 37, 33), (65, 96, 256)),
        DType.BF16: ((1, 5, 256), (3, 32, 64)),
    },
    expert_sizes={
        DType.F32: ((1, 8, 2, 64, 48), (7, 4, 1, 37, 19)),
        DType.BF16: ((3, 4, 2, 64, 32),),
    },
)
