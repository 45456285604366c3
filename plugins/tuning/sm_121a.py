"""The sizes of tactics on GB10. No times are recorded there, so each row has a `why`.

HEADS of sm_90a.py serve this architecture too.
"""

from spark_engine.plugins.tuning.sizes import ALONE, FAN, Chunks, Shared

_REHEARSED = "predicted best at {}, and rehearsed there: docs/results/rehearsed_gb10.md"
_FIRST = Chunks(128, 4, ALONE, False, _REHEARSED.format("1 row"), fallback=True)
_NEXT = Chunks(1024, 4, FAN, False, _REHEARSED.format("8 to 128 rows"))
DECODE = (_FIRST, _NEXT)
ROUNDS = (
    Shared(_FIRST, 1, why="heads with too few dimensions for a team", fallback=True),
    Shared(_FIRST, 2, why=_REHEARSED.format("1 row, a round of two")),
    Shared(_FIRST, 4, why=_REHEARSED.format("1 row, a round of four")),
    Shared(_NEXT, 2, why=_REHEARSED.format("8 to 128 rows, rounds of two")),
    Shared(_NEXT, 4, why=_REHEARSED.format("8 to 128 rows, rounds of four")),
)
