"""The tables of docs/performance.md, docs/results/ and the README, from results and baselines.

`python -m benchmarks.performance` writes each table between its markers (`<!-- NAME -->` and
`<!-- end NAME -->`); nothing else of the pages is touched, and no figure is written by hand.
Knows the rows that `time_step` saves; measures nothing.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import time_layouts
from benchmarks.accuracy import tables as accuracy_tables
from benchmarks.byte_floors import floor_of
from benchmarks.rehearsal.gb10 import tables as predicted_tables
from benchmarks.rehearsal.gb10.tables import table
from benchmarks.rehearsal.tables import rehearsed
from benchmarks.result_files import RESULTS, ROOT, read
from spark_engine.builder import checkpoint_list

DOCS = ROOT / "docs"
PAGES = (
    ROOT / "README.md",
    DOCS / "performance.md",
    DOCS / "models.md",
    *sorted((DOCS / "results").glob("*.md")),
)
DECODE = RESULTS / "decode"
DEFAULT = DECODE / "default_h200.json"  # engines as `spark-build` without options makes
DRAFTS = DECODE / "drafts_h200.json.xz"  # rounds of drafts of chosen acceptances
LAYOUTS = (DECODE / "layouts_h100.json", DECODE / "layouts_h200.json")  # by `time_layouts`
FITTED = DECODE / "decode_h200.json"  # buckets and context fitted to the benchmark
RENAMED = {"bench_decode": "time_step", "--npl": "--rows", "--default-build": "--build ''"}
STATE, THEIR_STATE = "f32", "fp32"
AUTO = "auto"  # k as the engine chooses
TYPICAL = (0.8, 0.75, 0.7)  # acceptance of three drafts, each where those before it were kept
BATCHES = (1, 8, 32, 64, 128)  # of the README, of the aims and of vLLM
PREDICTED = {"27b:nvfp4-a4": "Qwen3.8-27B with W4A4 MLP and head"}  # where nothing was measured
NAMES = {"qwen36-27b": "Qwen3.6-27B", "qwen36-35b-a3b": "Qwen3.6-35B-A3B"}
AIMS = {  # ms a step at BATCHES: what the project set out for before anything was measured
    "qwen36-27b": (5.4, 6.2, 9.2, 13.5, 21.0),
    "qwen36-35b-a3b": (1.4, 2.8, 6.2, 8.8, 11.5),
}
Row = Mapping[str, Any]


def rows_of(path: Path, state: str = STATE) -> dict[tuple[str, int], Row]:
    """The rows of a file with that recurrent state, by (model, sequences), ascending; of several
    contexts the shortest."""
    rows = [r for r in read(path)["rows"] if r["gdn_state"] == state]
    rows.sort(key=lambda r: -r.get("ctx", 0))
    return {(r["model"], r["npl"]): r for r in sorted(rows, key=lambda r: (r["model"], r["npl"]))}


def baselines() -> dict[str, dict[tuple[str, int], Row]]:
    """vLLM's rows by its name and version, oldest first."""
    files = sorted((ROOT / "benchmarks" / "baselines").glob("vllm_*_h200.json"))
    return {f"vLLM {path.name.split('_')[1]}": rows_of(path, THEIR_STATE) for path in files}


def decode() -> str:
    """Milliseconds of a decode step by sequences, with floor, aim and vLLM; by model."""
    ours, theirs = rows_of(DEFAULT), baselines()
    parts = []
    for model in NAMES:
        found = [row for (name, _), row in ours.items() if name == model]
        aims = dict(zip(BATCHES, AIMS[model], strict=True))
        cells = [_decode_cells(row, aims, theirs) for row in found]
        columns = ["sequences", "Spark", "tokens/s", "byte floor", "floor/Spark", "aim"]
        parts += [f"{NAMES[model]}, ms a step:", table([*columns, *theirs], cells)]
        parts.append(_measured(found))
    return "\n\n".join(parts)


def _decode_cells(
    row: Row, aims: Mapping[int, float], theirs: Mapping[str, Mapping[tuple[str, int], Row]]
) -> list[object]:
    npl, step, floor = row["npl"], row["step_ms"], floor_of(row)
    vllm = [_cell(rows.get((row["model"], npl)), "step_ms", "{:.2f}") for rows in theirs.values()]
    rate, share = f"{row['decode_tok_s']:,.0f}", f"{floor / step:.0%}"
    return [npl, f"{step:.2f}", rate, f"{floor:.2f}", share, aims.get(npl, ""), *vllm]


def _measured(rows: Sequence[Row]) -> str:
    """Card, commit and command; the same for all rows."""
    (line,) = _origins(rows)
    return line


def _origins(rows: Sequence[Row]) -> set[str]:
    return {
        f"{row['card']}, driver {row['driver']}, commit {row['commit']}, {row['date']}; replay "
        f"ring of {row['gdn_ring']}, KV {row['kv']}, state {row['gdn_state']}:\n"
        f"`{command_of(row)}`"
        for row in rows
    }


def _cards(rows: Iterable[Row]) -> set[str]:
    return {f"{r['card']}, driver {r['driver']}, commit {r['commit']}, {r['date']}" for r in rows}


def command_of(row: Row) -> str:
    """The command that measures a row today: rows keep that of their day."""
    command = str(row["command"])
    for old, new in RENAMED.items():
        command = command.replace(old, new)
    return command


def drafts() -> str:
    """Milliseconds of a kept token by k, at each acceptance, and what the rounds took; by model."""
    rows = _draft_rows()
    if not rows:
        return "Not measured yet."
    return "\n\n".join(part for model in NAMES for part in _drafts_of(model, rows))


def _draft_rows() -> list[Row]:
    rows: list[Row] = read(DRAFTS)["rows"] if DRAFTS.is_file() else []
    return rows


def _drafts_of(model: str, rows: Sequence[Row]) -> list[str]:
    found = [row for row in rows if row["model"] == model]
    if not found:
        return []
    depths = sorted({row["k"] for row in found}, key=lambda k: (isinstance(k, str), k))
    npls = sorted({row["npl"] for row in found})
    sets = sorted({tuple(row["acceptance"]) for row in found} - {()})
    by_key = {(r["npl"], r["k"], tuple(r["acceptance"])): r for r in found}
    names = ["no drafts" if k == 0 else f"k = {k}" for k in depths]
    fixed = [k for k in depths if k != AUTO]
    rounds = [[npl, *(_round_cell(by_key, npl, k, sets) for k in fixed)] for npl in npls]
    numbered = names[: len(fixed)]
    parts = [f"{NAMES[model]}, ms a round (byte floor):", table(["sequences", *numbered], rounds)]
    for asked in sets:
        cells = [[npl, *(_kept_cell(by_key, npl, k, asked) for k in depths)] for npl in npls]
        said = f"{NAMES[model]}, drafts right {_rates(asked)}: ms a kept token (tokens a round):"
        parts += [said, table(["sequences", *names], cells)]
    return [*parts, *sorted(_origins(found))]


_Drafted = Mapping[tuple[int, int | str, tuple[float, ...]], Row]


def _round_cell(rows: _Drafted, npl: int, k: int | str, sets: Iterable[tuple[float, ...]]) -> str:
    """The cheapest of its rows: they differ by what was kept, which costs nothing."""
    found = [row for asked in ((), *sets) if (row := rows.get((npl, k, asked)))]
    if not found:
        return "–"
    row = min(found, key=lambda row: float(row["round_ms"]))
    return f"{row['round_ms']:.2f} ({floor_of(row):.2f})"


def _kept_cell(rows: _Drafted, npl: int, k: int | str, asked: tuple[float, ...]) -> str:
    row = rows.get((npl, k, asked if k else ()))
    if row is None:
        return "–"
    return f"{row['ms_per_token']:.2f} ({row['tokens_per_round']:.2f})"


def other() -> str:
    """Prefill, start and memory of the same engines and of vLLM's."""
    everyone = {"Spark": rows_of(DEFAULT), **baselines()}
    columns = ["", *(f"prefill tokens/s at {npl}" for npl in BATCHES)]
    cells = []
    for model, name in NAMES.items():
        for system, rows in everyone.items():
            found = [rows.get((model, npl)) for npl in BATCHES]
            if any(found):
                prefill = [_cell(row, "prefill_tok_s", "{:,.0f}") for row in found]
                last = next(row for row in found if row)
                ready = _cell(last, "start_to_ready_s", "{:.1f} s")
                built = [_cell(last, key, unit) for key, unit in _BUILT]
                cells.append([f"{name}, {system}", *prefill, ready, *built])
    return table([*columns, "start to ready", "build", "GPU memory taken"], cells)


_BUILT = (("build_s", "{:.0f} s"), ("gpu_memory_gib", "{:.1f} GiB"))


def split() -> str:
    """Where a step's milliseconds go, each part with its byte floor; by model."""
    ours = rows_of(FITTED)
    parts = []
    for model, title in NAMES.items():
        found = [row for (name, _), row in ours.items() if name == model]
        names = sorted(found[-1]["parts_ms"], key=lambda part: -found[-1]["parts_ms"][part])
        cells = [
            [part, *(f"{r['parts_ms'][part]:.2f} ({_floors(r).get(part, 0):.2f})" for r in found)]
            for part in names
        ]
        whole = [f"{r['step_ms']:.2f} ({floor_of(r):.2f})" for r in found]
        launches = [f"{r['launches']} ({r['launches_per_layer']} a layer)" for r in found]
        host = [f"{r['host_ms']:.2f}" for r in found]
        cells += [["**step**", *whole], ["launches", *launches], ["host's share", *host]]
        columns = [f"{title}, ms (floor)", *(f"{r['npl']}" for r in found)]
        parts += [table(columns, cells), _measured(found)]
    return "\n\n".join(parts)


def _floors(row: Row) -> dict[str, float]:
    """Floors by part; the recurrence's is what the ring leaves of it."""
    floors = dict(row["floor_parts_ms"])
    floors["gdn"] -= row["floor_ms"] - floor_of(row)
    return floors


def short() -> str:
    """The README's: a row for each model with ours, ours with drafts, and vLLM's newest."""
    ours, cells = rows_of(DEFAULT), []
    for model, name in NAMES.items():
        theirs = {system: rows for system, rows in baselines().items() if (model, 1) in rows}
        system, newest = list(theirs.items())[-1]
        cells.append(_short(f"{name}, Spark", model, ours))
        if kept := _with_drafts(model):
            cells.append([f"{name}, Spark with drafts", *kept, "", ""])
        cells.append(_short(f"{name}, {system}", model, newest))
    return table(["", *map(str, BATCHES), f"prefill tokens/s at {BATCHES[-1]}", "start"], cells)


def _short(name: str, model: str, rows: Mapping[tuple[str, int], Row]) -> list[object]:
    found = [rows.get((model, npl)) for npl in BATCHES]
    last = next(row for row in reversed(found) if row)
    ends = (_cell(last, "prefill_tok_s", "{:,.0f}"), _cell(last, "start_to_ready_s", "{:.1f} s"))
    return [name, *(_cell(row, "step_ms", "{:.1f}") for row in found), *ends]


def _with_drafts(model: str) -> list[str]:
    """Milliseconds a kept token at the typical acceptance, at BATCHES; [] where not measured."""
    by_key = {
        (row["npl"], row["k"]): row
        for row in _draft_rows()
        if row["model"] == model and tuple(row["acceptance"]) == TYPICAL
    }
    found = [by_key.get((npl, AUTO)) for npl in BATCHES]
    return [_cell(row, "ms_per_token", "{:.1f}") for row in found] if any(found) else []


def _rates(acceptance: Iterable[float]) -> str:
    return " / ".join(f"{rate:.0%}" for rate in acceptance)


def _cell(row: Row | None, key: str, form: str) -> str:
    """The figure, or a dash where there is none."""
    return form.format(row[key]) if row and key in row else "–"


def predicted() -> str:
    """What a GB10 should do, where nothing was run."""
    return predicted_tables.predicted(NAMES | PREDICTED)


def gb10() -> str:
    """Tokens a second that a GB10 should reach, without drafts and with, by sequences."""
    return predicted_tables.rates(NAMES, TYPICAL)


def kept() -> str:
    """Milliseconds of a kept token as the engine chooses k, at each acceptance; of both models."""
    rows = [row for row in _draft_rows() if row["k"] in (0, AUTO)]
    sets = sorted({tuple(row["acceptance"]) for row in rows} - {()})
    by_key = {(r["model"], r["npl"], r["k"], tuple(r["acceptance"])): r for r in rows}

    def cell(model: str, npl: int, k: int | str, asked: tuple[float, ...]) -> str:
        return _cell(by_key.get((model, npl, k, asked)), "ms_per_token", "{:.2f}")

    cells = [
        [name, npl, cell(model, npl, 0, ()), *(cell(model, npl, AUTO, asked) for asked in sets)]
        for model, name in NAMES.items()
        for npl in BATCHES
    ]
    return table(["", "sequences", "no drafts", *map(_rates, sets)], cells)


def layouts() -> str:
    """Steps and prefill of other formats, next to their floors and aims; a table for each card."""
    found = map(time_layouts.timed, LAYOUTS)
    tables = ([*time_layouts.table(rows), "", *sorted(_cards(rows.values()))] for rows in found)
    return "\n\n".join(map("\n".join, tables))


def machines() -> str:
    """The README's: tokens a second of each model on each machine, and where the figure is from."""
    ours = rows_of(DEFAULT)
    cells = []
    for model, name in reversed(NAMES.items()):
        checkpoint = f"`nvidia/{name}-NVFP4`"
        cells.append(["DGX Spark", checkpoint, *predicted_tables.first(model), "predicted"])
        rates = [_cell(ours.get((model, npl)), "decode_tok_s", "{:,.0f}") for npl in (1, 8)]
        cells.append(["H200", checkpoint, *rates, "measured"])
    cells.sort(key=lambda cell: cell[0])
    return table(["machine", "checkpoint", "1 user", "8 users", "figures"], cells)


def checkpoints() -> str:
    """What `spark-build --list` prints."""
    columns, cells = checkpoint_list.table(checkpoint_list.listed())
    return table(columns, [[f"`{name}`", *rest] for name, *rest in cells])


TABLES = {
    "decode": decode,
    "drafts": drafts,
    "other": other,
    "split": split,
    "short": short,
    "predicted": predicted,
    "gb10": gb10,
    "kept": kept,
    "layouts": layouts,
    "machines": machines,
    "rehearsed": rehearsed,
    "checkpoints": checkpoints,
    "rounding": accuracy_tables.rounding,
    "held_out": accuracy_tables.held_out,
    "snapshots": accuracy_tables.snapshots,
    "state_error": accuracy_tables.state_error,
}


def filled(text: str) -> str:
    """The page with every marked table written again."""
    for name, make in TABLES.items():
        begin, end = f"<!-- {name} -->\n", f"\n<!-- end {name} -->"
        form = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        text = form.sub(lambda _, b=begin, e=end, m=make: f"{b}{m()}{e}", text)
    return text


def main() -> None:
    for page in PAGES:
        page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main()
