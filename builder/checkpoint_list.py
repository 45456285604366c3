"""`spark-build --list`: which checkpoints are read, where they fit, how fast they are there.

`benchmarks.checkpoints` writes the rows, docs/models.md has the same table. Plans nothing.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")
Json = dict[str, Any]
NOTE = (
    "A number below a machine: sequences of {context:,} tokens that fit at once; –: none does. "
    "24 and 32 GB: memory alone, there are kernels for Hopper and GB10 only. tokens/s: of 1 and of "
    "8 users together, without drafts."
)


def listed() -> Json:
    """`context`, `machines` and the rows, `checkpoints`."""
    found: Json = json.loads(FILE.read_text())
    return found


def table(whole: Json) -> tuple[list[str], list[list[str]]]:
    """Headings and cells."""
    cards = list(dict.fromkeys(s["card"] for row in whole["checkpoints"] for s in row["speeds"]))
    columns = ["checkpoint", "weights", "GB", *whole["machines"]]
    columns += [f"tokens/s, {card}" for card in cards] + ["targets", "tested"]
    cells = []
    for row in whole["checkpoints"]:
        speeds = {
            s["card"]: f"{s['users']['1']} / {s['users']['8']} {s['how']}" for s in row["speeds"]
        }
        held = [str(row["sequences"][name] or "–") for name in whole["machines"]]
        cells.append([row["name"], row["weights"], f"{row['gb']:.1f}", *held])
        cells[-1] += [*(speeds.get(card, "–") for card in cards), ", ".join(row["targets"]) or "–"]
        cells[-1].append(row["tested"])
    return columns, cells


def lines(whole: Json) -> list[str]:
    """The table as text, a line a row."""
    columns, cells = table(whole)
    rows: list[Sequence[str]] = [columns, *cells]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    return [*(line.rstrip() for line in text), "", NOTE.format(**whole)]
