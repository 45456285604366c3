"""The sizes of tactics on Hopper. Rows without a `why` are the best of some published bucket in
sm_90a.json.

Attention runs in one wave if rows times kv heads times chunks do not exceed the resident blocks: a
few long rows fill the GPU with 64 chunks, more rows with fewer, longer chunks.
"""

from spark_engine.plugins.tuning.sizes import ALONE, FAN, Chunks

DECODE = (
    Chunks(128, 8, ALONE, True, fallback=True),
    Chunks(256, 3, ALONE, True, why="rounds of drafts: teams over rows of long contexts"),
    Chunks(1024, 12, FAN, True),
    Chunks(1024, 6, FAN, True),
    Chunks(1024, 3, FAN, True),
)
