"""What a stage's figure is to be, in words: of docs/performance.md's data where that has it.

Knows the aims of decode steps (`performance`) and the checklist's rows (`checklist_rows`); measures
nothing.
"""

from __future__ import annotations

from benchmarks.checklist_rows import ROWS
from benchmarks.performance import AIMS, BATCHES
from benchmarks.stages.table import Stage, StageError


def aim_of(stage: Stage) -> str:
    """Empty where nothing was asked for. Raises StageError for one that is not in the data."""
    found = []
    try:
        if model := stage.aim.get("decode"):
            ms, rows = (" / ".join(map(str, numbers)) for numbers in (AIMS[model], BATCHES))
            found.append(f"{ms} ms at {rows}")
        asked = {row.number: row.asked for row in ROWS}
        found += [asked[number] for number in stage.aim.get("seeds", ())]
    except KeyError as error:
        raise StageError(f"row {stage.name}: no data has the aim {error}") from error
    return "; ".join([*found, *filter(None, [stage.aim.get("words")])])
