"""The tables of docs/results/rehearsed_gb10.md, from what `benchmarks.rehearsal` kept.

Knows the rows that its parts report; measures nothing. A part without a file was not run, and the
table says so.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rehearsal.reporter import PREFILLS
from benchmarks.result_files import REHEARSED, read

PARTS = {
    "ops": "every tactic over its op's cases",
    "tests": "the other tests that need a GPU",
    "check": "whole engines: spark-check and the trial of batches",
    "layers": "the published shapes, node by node",
    "steps": "steps next to another process",
    "memcheck": "the ops' cases under compute-sanitizer's memcheck, a share a row",
    "racecheck": "the same under racecheck",
}
SLOWEST = 8  # kinds of launches of a bucket that are named
Row = Mapping[str, Any]


def rehearsed(folder: Path = REHEARSED) -> str:
    """All tables; a sentence where nothing was run."""
    found = {part: kept for part in PARTS if (kept := _read(folder / f"{part}.json.xz"))}
    if not found:
        return "Not run yet."
    blocks = [_table(("part", "rows", "not right", "where", "date"), _parts(found)), _cards(found)]
    blocks.append(_skipped(found))
    wrong = [(part, r["label"], " ".join(r.get("note", "").split())) for part, kept in found.items()
             for r in kept["rows"] if not r.get("right")]  # fmt: skip
    if wrong:
        blocks.append(_table(("part", "not right", "why"), wrong))
    if "ops" in found:
        blocks.append(_ops(found["ops"]["rows"]))
    if "check" in found:
        blocks.append(_served(found["check"]["rows"]))
    if "layers" in found:
        blocks += _layers(found["layers"]["rows"])
    for run in _read(folder / PREFILLS).get("runs", ()):
        blocks.append(_prefill(run))
    if "steps" in found:
        blocks.append(_steps(found["steps"]["rows"]))
    return "\n\n".join(filter(None, blocks))


def _read(path: Path) -> dict[str, Any]:
    return dict(read(path)) if path.is_file() else {}


def _parts(found: Mapping[str, Row]) -> Iterable[Sequence[object]]:
    for part, what in PARTS.items():
        kept = found.get(part)
        if kept is None:
            yield what, "–", "not run", "", ""
            continue
        wrong = sum(not row.get("right") for row in kept["rows"])
        where = kept.get("fitted_to", "")
        if "multiprocessors" in kept:
            where += f", {kept['kind']}, blocks on {kept['seen'][-1]} multiprocessors"
        yield what, len(kept["rows"]), wrong, where, kept.get("date", "")


def _cards(found: Mapping[str, Row]) -> str:
    """How many rows of each part are of which card, as far as they say."""
    said = {
        part: Counter(r["card"] for r in kept["rows"] if "card" in r)
        for part, kept in found.items()
    }
    words = (
        f"{part} {', '.join(f'{count} on an {card}' for card, count in counts.items())}"
        for part, counts in said.items()
        if counts
    )
    named = "; ".join(words)
    return named and f"Rows by the card that they were measured on: {named}."


def _skipped(found: Mapping[str, Row]) -> str:
    """How many tests were skipped, by reason, where that is known."""
    known = found.get("tests", {}).get("skipped")
    if not isinstance(known, Mapping):
        return ""
    return "Tests that were skipped: " + "; ".join(f"{n} ({why})" for why, n in known.items()) + "."


def _ops(rows: Sequence[Row]) -> str:
    """A line for each tactic: its cases, those that are wrong, and its times."""
    kinds: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        op, tactic, *_ = row["label"].split("/")
        kinds.setdefault((op, tactic), []).append(row)
    cells = []
    for (op, tactic), found in kinds.items():
        times = sorted(row["us"] for row in found if "us" in row)
        between = f"{times[0]:.1f} to {times[-1]:.1f}" if times else "–"
        wrong = sum(not row.get("right") for row in found)
        spills = max((row.get("spills", 0) for row in found), default=0)
        cells.append((op, tactic, len(found), wrong or "", between, spills or ""))
    return _table(("op", "tactic", "cases", "not right", "us of a case", "bytes spilled"), cells)


def _served(rows: Sequence[Row]) -> str:
    cells = [(row["label"], row.get("note", ""), row.get("steps", "")) for row in rows
             if row["label"].startswith("batches/")]  # fmt: skip
    return _table(("batches", "64 requests together and alone", "times"), cells) if cells else ""


def _layers(rows: Sequence[Row]) -> Iterable[str]:
    nodes = []
    for row in rows:
        model, _, kind = row["label"].partition("/op/")
        if kind:
            worst = row.get("worst", {})
            figures = [
                f"{worst[name]:.2g}" if name in worst else "" for name in ("rel_l2", "scale")
            ]
            nodes.append((model, kind, row["findings"], row["failed"] or "", *figures))
    if nodes:
        yield _table(("model", "op", "nodes", "not right", "rel_l2", "scale"), nodes)
    for row in rows:
        if "kinds" in row:
            longest = [(node, op, tactic, count, f"{us / 1e3:.3f}")
                       for node, op, tactic, count, us in row["kinds"][:SLOWEST]]  # fmt: skip
            head = f"{row['label'].replace('/', ', ')} rows: {row['graph_ms']:.3f} ms as a graph"
            columns = ("node", "op", "tactic", "launches", "ms of all, one by one")
            yield f"{head}\n\n{_table(columns, longest)}"


def _prefill(run: Row) -> str:
    """A prompt's prefill and its floor, those kinds first that are furthest from theirs."""
    known = run["machine"]
    head = (
        f"{run['model']}, prefill of {run['tokens']:,} tokens and the floor of "
        f"{known['sms']} multiprocessors ({known['card']}, {known['part']}; "
        f"{known['read'] / 1e12:.2f} TB/s read, {known['mma'] / 1e12:.0f} TFLOP/s of mma.sync with "
        f"bf16 or f16 factors, both measured there): {run['ms']:.1f} ms, "
        f"{run['ms'] / run['layers']:.2f} a layer, **{run['ms'] / run['floor_ms']:.2f} times the "
        f"floor** of {run['floor_ms']:.1f} ms, {run['floor_ms'] / run['layers']:.2f} a layer"
    )
    cells = []
    floors = [(max(r["bytes_us"], r["ops_us"]), r) for r in run["rows"] if r["us"] is not None]
    for floor, r in sorted(floors, key=lambda f: f[1]["count"] * (f[0] - f[1]["us"]))[:SLOWEST]:
        bound = "products" if r["ops_us"] > r["bytes_us"] else "bytes"
        ratio = f"{r['us'] / floor:.2f}" if floor else "–"
        figures = (r["count"], f"{r['us']:.0f}", f"{floor:.0f}", bound, ratio)
        cells.append((r["node"], r["op"], r["tactic"], *figures))
    columns = ("node", "op", "tactic", "nodes", "us of one", "floor", "bound by", "times")
    return f"{head}:\n\n{_table(columns, cells)}"


def _steps(rows: Sequence[Row]) -> str:
    """A line for each engine, of its shares."""
    engines: dict[str, list[Row]] = {}
    for row in rows:
        if "steps" in row:
            engines.setdefault(row["label"].partition("/")[0], []).append(row)
    cells = [
        (
            name,
            f"{sum(r['steps'] for r in found):,}",
            statistics.median(r["median_ms"] for r in found),
            max(r["most_ms"] for r in found),
            "yes" if all(r["right"] for r in found) else "no",
        )
        for name, found in engines.items()
    ]
    columns = ("engine", "steps", "ms, median", "ms, longest", "the first answer again at the end")
    return _table(columns, cells)


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *([str(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
