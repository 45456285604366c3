"""The sizes of tactics on Hopper. Rows without a `why` are the best of some published bucket in
sm_90a.json.

Attention runs in one wave if rows times kv heads times chunks do not exceed the resident blocks: a
few long rows fill the GPU with 64 chunks, more rows with fewer, longer chunks.
"""

from spark_engine.plugins.tuning.sizes import ALONE, FAN, Chunks, Shared

_LOG = "best of a round of four at {}: benchmarks/log/attention/attention_round_mma.md"
_TEAM = Chunks(256, 3, ALONE, True, why="the order of sums of teams at long contexts")
_FIRST, _NEXT = Chunks(128, 8, ALONE, True), Chunks(256, 8, ALONE, True, fallback=True)
_WIDE, _WIDEST = Chunks(512, 12, FAN, True), Chunks(1024, 12, FAN, True)
_SIX, _THREE = Chunks(1024, 6, FAN, True), Chunks(1024, 3, FAN, True)
DECODE = (_FIRST, _NEXT, _TEAM, _WIDE, _WIDEST, _SIX, _THREE)
ROUNDS = (
    Shared(_FIRST, 1, why=_LOG.format("1 row of the 35B")),
    Shared(_NEXT, 1, why=_LOG.format("1 row of the 27B"), fallback=True),
    Shared(_TEAM, 2, why="two tokens of long rows read their keys once"),
    Shared(_TEAM, 4, why="four tokens of long rows read their keys once"),
    Shared(_WIDE, 1, why=_LOG.format("8 rows of the 35B")),
    Shared(_WIDEST, 1, why=_LOG.format("8 rows of the 27B")),
    Shared(_SIX, 2, why=_LOG.format("32 rows of the 35B")),
    Shared(_THREE, 2, why="rounds of two in the order of one token's best at 128 rows"),
    Shared(_THREE, 4, why=_LOG.format("32 to 128 rows of the 27B")),
)
