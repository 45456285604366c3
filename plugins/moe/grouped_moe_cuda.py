"""The CUDA side of `grouped_moe`: its tactics, by the number of tokens.

`each` (up to 4 tokens), `grouped` (any number; streams each expert once), `wide` (many; wgmma) and
`tiles` (many; mma.sync) sum in one order, so they give the same bits. A prefill's, `wide_128`,
`tiles_128` and `tiles_fp4` (W4A4), each have an order of their own. How operands are packed is
moe_packs'.
"""

from __future__ import annotations

from spark_engine.plugins.moe.moe_each_cuda import EACH
from spark_engine.plugins.moe.moe_grouped_cuda import GROUPED
from spark_engine.plugins.moe.moe_tiles_cuda import TILES, TILES_128
from spark_engine.plugins.moe.moe_tiles_fp4_cuda import TILES_FP4
from spark_engine.plugins.moe.moe_wide_cuda import WIDE, WIDE_128

CANDIDATES = (EACH, GROUPED, WIDE, WIDE_128, TILES, TILES_128, TILES_FP4)
