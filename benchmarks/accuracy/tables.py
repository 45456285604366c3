"""The tables of docs/results/accuracy.md, from the rows that `measure` saves."""

from collections.abc import Sequence
from typing import Any

from benchmarks.accuracy.choices import CHOICES, EMBEDDED, NVFP4, Choice
from benchmarks.rehearsal.gb10.tables import table
from benchmarks.result_files import RESULTS, read

GATE = 0.1  # of what the weight format costs: the most that a default may add
Row = dict[str, Any]


def _rows(kind: str) -> list[Row]:
    return [row for row in read(RESULTS / "accuracy.json") if row["kind"] == kind]


def _found(choices: Sequence[Choice], rows: Sequence[Row]) -> list[Row]:
    """Those that were measured, in the order of the choices."""
    by_name = {row["choice"]: row for row in rows}
    return [by_name[c.name] for c in choices if c.name in by_name]


def rounding() -> str:
    """The random model: a table for each context."""
    parts, every = [], _rows("random")
    for context in sorted({row["context"] for row in every}):
        rows = _found(CHOICES, [row for row in every if row["context"] == context])
        lost = next((row["kl"] for row in rows if row["choice"] == NVFP4), None)
        cells = []
        for row in rows[1:]:
            share = row["added"] / lost if lost else None
            passes = "" if share is None or row["kl"] == lost else "yes" if share < GATE else "no"
            percent = "" if share is None else f"{share:.2%}" if share >= 1e-4 else "< 0.01%"
            kl = f"{row['kl']:.2e}"
            cells.append(
                [row["choice"], kl, f"{row['top1']:.2%}", f"{row['added']:.2e}", percent, passes]
            )
        tokens = " or ".join(sorted({f"{row['tokens']:,}" for row in rows}))
        columns = ["rounded", "KL", "same token", "KL that it adds", "of NVFP4's", "below a tenth"]
        parts.append(f"Contexts of {context:,} tokens, {tokens} judged:\n\n{table(columns, cells)}")
    return "\n\n".join(parts)


def held_out() -> str:
    """The embedded model."""
    cells = []
    for row in (rows := _found(EMBEDDED, _rows("embedded"))):
        losses = [f"{x:.4f}" for x in row["perplexity"]]
        kept = [f"{x:.0%}" for x in row["kept"]]
        cells.append([row["choice"], *losses, *kept, f"{1 + sum(row['kept']):.2f}", row["rounds"]])
    columns = ["engine", "stories", "chat", "first", "two", "three", "tokens a round", "rounds"]
    tokens = " or ".join(sorted({f"{row['tokens']:,}" for row in rows}))
    return f"{tokens} judged tokens:\n\n{table(columns, cells)}"


def snapshots() -> str:
    """Snapshots of the embedded model, rounded."""
    rows = _rows("snapshots")
    lost = next(row["kl"] for row in rows if row["choice"] == NVFP4)
    cells = [
        [
            row["choice"], f"{row['kl']:.1e}", f"{row['kl'] / lost:.3%}", f"{row['first']:.1e}",
            f"{row['top1']:.2%}", f"{row['texts']:.0%}", f"{row['perplexity']:.5f}",
        ]
        for row in rows
    ]  # fmt: skip
    columns = ["states", "KL", "of NVFP4's", "KL of the first 32", "same token"]
    columns += ["texts with the same first 32", "perplexity"]
    return f"{rows[0]['tokens']:,} judged tokens:\n\n{table(columns, cells)}"


def state_error() -> str:
    (row,) = _rows("states")
    cells = []
    for run in row["rows"]:
        name = f"{run['state']}, each token" if run["every"] == 1 else run["state"]
        errors = [f"{x:.1e}" for x in (*run["output"], *run["error"])]
        cells.append([f"{run['tokens']:,}", name, *errors, f"{run['largest']:.1f}"])
    heads = ["20 tokens", "200", "3,000", "3,000, keys alike"]
    columns = ["tokens", "stored as", *(f"o: {h}" for h in heads), *(f"S: {h}" for h in heads)]
    return table([*columns, "largest S"], cells)
