"""The sizes that are tactics on GB10, which no time was recorded on: each row says why it is one.

Heads of the delta rule are Hopper's.
"""

from __future__ import annotations

from spark_engine.plugins.tuning.sizes import ALONE, FAN, Chunks, Shared

_REHEARSED = "predicted best at {}, and rehearsed there: docs/results/rehearsed_gb10.md"
_FIRST = Chunks(128, 4, ALONE, False, _REHEARSED.format("1 row"), fallback=True)
_NEXT = Chunks(1024, 4, FAN, False, _REHEARSED.format("8 to 128 rows"))
DECODE = (_FIRST, _NEXT)
ROUNDS = (
    Shared(_FIRST, 1, why="heads of fewer dimensions than a team takes", fallback=True),
    Shared(_FIRST, 2, why=_REHEARSED.format("1 row, a round of two")),
    Shared(_FIRST, 4, why=_REHEARSED.format("1 row, a round of four")),
    Shared(_NEXT, 2, why=_REHEARSED.format("8 to 128 rows, rounds of two")),
    Shared(_NEXT, 4, why=_REHEARSED.format("8 to 128 rows, rounds of four")),
)
