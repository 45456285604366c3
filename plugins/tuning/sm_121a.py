"""The sizes of tactics on GB10. No times are recorded there, so each row has a `why`.

HEADS of sm_90a.py serve this architecture too.
"""

from spark_engine.plugins.tuning.sizes import ALONE, FAN, Chunks

_REHEARSED = "predicted best at {}, and rehearsed there: docs/results/rehearsed_gb10.md"
DECODE = (
    Chunks(128, 4, ALONE, False, _REHEARSED.format("1 row"), fallback=True),
    Chunks(1024, 4, FAN, False, _REHEARSED.format("8 to 128 rows")),
)
