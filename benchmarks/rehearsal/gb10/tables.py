"""The tables of what a GB10 should do, from the rows that `gb10.predict` keeps.

Knows those rows and Markdown; predicts nothing. `benchmarks.performance` puts them in their page.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.result_files import REHEARSED, read
from benchmarks.time_images import WORDS
from spark_engine.vision import ROW_PATCHES

PREDICTED = REHEARSED / "predicted.json.xz"
GOALS = {  # tokens a second without drafts, by sequences: set before anything was predicted
    "qwen36-27b": {1: 12.5, 128: 690},
    "qwen36-35b-a3b": {128: 1000},
}
SHOWN = (1, 32, 128)  # numbers of sequences for which the slowest parts are named
TOKENS = 64  # of a tile of prefill
REPLACED = {  # by what a fit is of: how a kernel without a fit is predicted
    "op": "other tactics of the op",
    "part": "other ops of the same kind",
    "": "**no measurement**: its bytes, and the builder's cost model",
}
Row = Mapping[str, Any]


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *([str(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def predicted(names: Mapping[str, str], path: Path | None = None) -> str:
    """Everything that is said of a GB10; `names` of models as they are to be read."""
    whole = read(path or PREDICTED)
    rows, parts = whole["rows"], [held(whole, names)]
    for model, name in names.items():
        mine = [row for row in rows if row["model"] == model]
        if mine:
            parts += [f"{name}, decode, ms a step:", decode(model, mine)]
            parts += ["Its slowest parts:", slowest(mine), untimed(mine)]
            parts += [f"{name}, tokens/s with drafts (how many a round):", drafts(mine)]
            if seen := [row for row in mine if "drafter" in row]:
                said = f"{name}, rounds of one sequence with {seen[0]['state']} states and the list"
                parts += [f"{said} of ids, a GB10's defaults:", default_rounds(seen)]
            parts += [f"{name}, prefill of one prompt:", prefill(mine)]
            if seen := [row for row in mine if row["family"] == "vision"]:
                parts += [f"{name}, one image with {WORDS} tokens of text:", images(seen)]
    source = whole["source"].removeprefix("rehearsal_").removesuffix(".xz") + ".xz"
    command = "python -m benchmarks.rehearsal.gb10.predict"
    command += f" --from benchmarks/results/rehearsal/{source}"
    return "\n\n".join([*parts, f"Commit {whole['commit']}, {whole['date']}: `{command}`"])


def held(whole: Row, names: Mapping[str, str]) -> str:
    """How far predictions are from what was measured on the machine that they were fitted on."""
    cells = [
        [
            f"{names.get(row['model'], row['model'])}, {row['family']}",
            row["rows"] * (TOKENS if row["family"] == "prefill" else 1),
            f"{row['measured_ms']:,.2f}",
            f"{row['seen_ms']:,.2f} ({row['seen_error']:+.1%})",
            "–"
            if row["unseen_ms"] is None
            else f"{row['unseen_ms']:,.2f} ({row['unseen_error']:+.1%})",
        ]
        for row in whole["held"]
    ]
    columns = ["", "rows or tokens", "measured", "predicted"]
    columns += ["fitted without any launch of as many rows"]
    said = "Predicted and measured, ms, on the machine that kernel costs were fitted on"
    said += f" ({whole['machine']}):"
    return f"{said}\n\n{table(columns, cells)}"


def decode(model: str, rows: Sequence[Row]) -> str:
    """Milliseconds of a step by sequences, and tokens a second with the goal."""
    goals = GOALS.get(model, {})
    narrow = {r["rows"]: r for r in rows if r["family"] == "decode" and r["state"] != "f32"}
    cells = []
    for row in (r for r in rows if r["family"] == "decode" and r["state"] == "f32"):
        n, other = row["rows"], narrow.get(row["rows"])
        cells.append(
            [
                n,
                f"{row['byte_floor_ms']:.1f}",
                f"{row['floor_ms']:.1f}",
                f"{row['ms']:.1f} ({row['apart_ms']:.1f})",
                f"{rate(n, row['ms'])} ({rate(n, row['apart_ms'])})",
                f"{goals[n]:,} (floor {rate(n, row['floor_ms'])})" if n in goals else "",
                f"{other['ms']:.1f}, {rate(n, other['ms'])}" if other else "–",
            ]
        )
    columns = ["sequences", "byte floor", "floor", "predicted (without overlap)"]
    columns += ["tokens/s", "goal", "with bf16 states: ms, tokens/s"]
    return table(columns, cells)


def slowest(rows: Sequence[Row]) -> str:
    """The three parts that take longest at some numbers of sequences, with their floors."""
    cells = []
    for row in (r for r in rows if r["family"] == "decode" and r["state"] == "f32"):
        for part in row["slowest"] if row["rows"] in SHOWN else ():
            name = f"`{part['node']}` ({part['op']}, {part['tactic']})"
            times = [f"{part[n]:.1f}" for n in ("ms", "floor_ms")]
            cells.append([row["rows"], name, part["nodes"], *times, part["bound"]])
    return table(["sequences", "part", "nodes", "ms", "floor", "bound by"], cells)


def untimed(rows: Sequence[Row]) -> str:
    """The kinds of kernel with an untimed tactic, each where it takes most of a bucket."""
    buckets = [row for row in rows if "untimed" in row]
    found: dict[tuple[str, str, str], list[tuple[Row, Row]]] = {}
    for bucket in buckets:
        for kind in bucket["untimed"]:
            key = (kind["op"], kind["tactic"], kind["fitted_by"])
            found.setdefault(key, []).append((kind, bucket))
    if not found:
        return f"All kernels of these {len(buckets)} buckets were timed."
    cells = []
    for (op, tactic, by), pairs in found.items():
        kind, bucket = max(pairs, key=lambda pair: pair[0]["ms_share"])
        where = f"{bucket['family']} {bucket['rows'] * _tokens(bucket)}, {bucket['state']} states"
        shares = [f"{kind[f'{name}_share']:.1%}" for name in ("launches", "bytes", "ms")]
        kept = REPLACED[by]
        cells.append([f"{op}, {tactic}", kept, len(pairs), where, *shares])
    cells.sort(key=lambda cell: -float(str(cell[-1]).rstrip("%")))
    columns = ["kernel", "predicted by", "buckets", "largest in", "share of launches"]
    columns += ["share of bytes", "share of predicted time"]
    said = f"Kernels without a measured time, of {len(buckets)} buckets:"
    return f"{said}\n\n{table(columns, cells)}"


def _tokens(bucket: Row) -> int:
    return TOKENS if bucket["family"] == "prefill" else 1


def drafts(rows: Sequence[Row]) -> str:
    """Tokens a second at each acceptance, with the drafts that bring most."""
    rounds = [r for r in rows if r["family"] == "rounds"]
    sets = list(dict.fromkeys(tuple(r["acceptance"]) for r in rounds))
    by_key = {(r["rows"], tuple(r["acceptance"])): r for r in rounds}
    cells = [
        [n, *(_most(by_key[n, asked]) for asked in sets)]
        for n in dict.fromkeys(r["rows"] for r in rounds)
    ]
    return table(["sequences", *(" / ".join(f"{a:.0%}" for a in s) for s in sets)], cells)


def default_rounds(rows: Sequence[Row]) -> str:
    """Of each drafter: a step, a round, and what of the round's drafts takes longest."""
    cells = []
    for row in rows:
        slow = (f"`{s['node']}` {s['ms']:.1f} ({s['floor_ms']:.1f})" for s in row["slowest_drafts"])
        cells.append([f"{row['drafter']}, {row['k']}", f"{row['step_ms']:.1f}"])
        cells[-1] += [f"{row['ms']:.1f} ({row['apart_ms']:.1f})", f"{row['byte_floor_ms']:.1f}"]
        cells[-1] += [f"{row['tokens']:.2f}", rate(row["tokens"], row["ms"]), ", ".join(slow)]
    columns = ["drafter, drafts", "step, ms", "round, ms (without overlap)", "byte floor, ms"]
    columns += ["tokens a round (given)", "tokens/s", "slowest parts of its drafts, ms (floor)"]
    return table(columns, cells)


def _most(row: Row) -> str:
    return f"{_number(row['tok_s'][str(row['k'])])} ({row['k']})"


def prefill(rows: Sequence[Row]) -> str:
    """Of one prompt: its floor, what is predicted, and the part that takes longest."""
    cells = []
    for row in (r for r in rows if r["family"] == "prefill"):
        tokens, part = TOKENS * row["rows"], row["slowest"][0]
        slow = f"`{part['node']}` ({part['op']}, {part['tactic']}) {part['ms']:,.0f} "
        slow += f"({part['floor_ms']:,.0f})"
        cells.append([f"{tokens:,}", f"{row['floor_ms']:,.0f}"])
        cells[-1] += [f"{row['ms']:,.0f} ({row['apart_ms']:,.0f})"]
        cells[-1] += [f"{rate(tokens, row['ms'])} ({rate(tokens, row['apart_ms'])})", slow]
    columns = ["tokens", "floor, ms", "predicted, ms (without overlap)", "tokens/s"]
    columns += ["slowest part, ms (floor)"]
    return table(columns, cells)


def images(rows: Sequence[Row]) -> str:
    """The tower, and the first token of a prompt with an image: the tower's time and prefill's."""
    cells = []
    for row in rows:
        part, ms, apart = row["slowest"][0], row["ms"], row["apart_ms"]
        text, slow = row["prefill_ms"], row["prefill_apart_ms"]
        cells.append([f"{row['rows'] * ROW_PATCHES:,}", f"{row['floor_ms']:,.1f}"])
        cells[-1] += [f"{ms:,.1f} ({apart:,.1f})", f"{text:,.0f} ({slow:,.0f})"]
        cells[-1] += [f"{ms + text:,.0f} ({apart + slow:,.0f})"]
        cells[-1] += [f"{part['op']} {part['ms']:,.1f} ({part['floor_ms']:,.1f})"]
    columns = ["patches", "tower: floor, ms", "predicted (without overlap)"]
    columns += ["first token of as much text", "with the image", "slowest part of the tower"]
    return table(columns, cells)


def rates(names: Mapping[str, str], typical: tuple[float, ...]) -> str:
    """Tokens a second by sequences, without drafts and with, of every model; the short table."""
    rows = read(PREDICTED)["rows"]
    steps = _steps(rows)
    drafted = {
        (r["model"], r["rows"]): _number(r["tok_s"][str(r["k"])])
        for r in rows
        if r["family"] == "rounds" and tuple(r["acceptance"]) == typical
    }
    cells = [
        [n, *(found.get((model, n), "–") for model in names for found in (steps, drafted))]
        for n in dict.fromkeys(n for _, n in steps)
    ]
    asked = " / ".join(f"{share:.0%}" for share in typical)
    columns = (form for name in names.values() for form in (name, f"{name}, drafts kept {asked}"))
    return table(["sequences", *columns], cells)


def first(model: str, sequences: Sequence[int] = (1, 8)) -> list[str]:
    """Tokens a second of so many sequences, without drafts."""
    steps = _steps(read(PREDICTED)["rows"])
    return [steps[model, n] for n in sequences]


def _steps(rows: Iterable[Row]) -> dict[tuple[str, int], str]:
    """Tokens a second of a decode step by (model, sequences)."""
    found = (r for r in rows if r["family"] == "decode" and r["state"] == "f32")
    return {(r["model"], r["rows"]): rate(r["rows"], r["ms"]) for r in found}


def rate(tokens: int, ms: float) -> str:
    """Tokens a second."""
    return _number(tokens / ms * 1e3)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
