"""The CUDA side of `grouped_moe`: four tactics, by the number of tokens.

`each` (up to 4 tokens), `grouped` (any number; streams each expert once), `wide` (many; Hopper) sum
in one order, so they give the same bits. `wide_128` (a prefill's) has an order of its own. How
operands are packed is moe_packs'.
"""

from __future__ import annotations

from spark_engine.kernel import Cuda
from spark_engine.plugins.moe import moe_packs
from spark_engine.plugins.moe.moe_each_cuda import EACH
from spark_engine.plugins.moe.moe_grouped_cuda import GROUPED
from spark_engine.plugins.moe.moe_tiles_cuda import TILES, TILES_128
from spark_engine.plugins.moe.moe_wide_cuda import WIDE, WIDE_128

CUDA = Cuda(tactics=(EACH, GROUPED, WIDE, WIDE_128, TILES, TILES_128), packs=moe_packs.PACKS)
