"""The CUDA side of `grouped_moe`: its tactics, by the number of tokens.

`each` (up to 4 tokens), `grouped` (any number; streams each expert once), `wide` (many; wgmma) and
`tiles` (many; mma.sync) sum in one order, so they give the same bits. A prefill's, `wide_128`,
`tiles_128` and `tiles_fp4` (W4A4), each have a separate order. How operands are packed is
expert_packs'.
"""

from spark_engine.plugins.kernels.moe.experts.experts_each_kernels import EACH
from spark_engine.plugins.kernels.moe.experts.experts_grouped_kernels import GROUPED
from spark_engine.plugins.kernels.moe.experts.experts_tiles_kernels import (
    TILES,
    TILES_128,
    TILES_FP4,
)
from spark_engine.plugins.kernels.moe.experts.experts_wide_fp8_kernels import WIDE_128
from spark_engine.plugins.kernels.moe.experts.experts_wide_kernels import WIDE

CANDIDATES = (EACH, GROUPED, WIDE, WIDE_128, TILES, TILES_128, TILES_FP4)
