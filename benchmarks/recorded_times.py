"""What `plugins/tuning/<architecture>.json` has of each tactic, and what a build loses by it.

`python -m benchmarks.recorded_times FILE...` replaces the rows of the ops in FILE, an `--out` of
`benchmarks.time_op` on this architecture's card: the least microseconds of each tactic by op, size
and tokens. Without files it prints, by op, how much longer than the recorded best the tactics take
that a build without a GPU chooses: by the formulas of the kernels, by recorded times, and by
recorded times without those of the node's own size. `--architecture` names the file.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

from benchmarks.result_files import MODELS, ROOT, read, write
from benchmarks.time_op import shapes, sizes_of, takers
from spark_engine.builder.native.tactics import Work
from spark_engine.kernel import CARDS, Target
from spark_engine.plugins.tuning import recorded

TUNING = ROOT / "plugins" / "tuning"
AT = "decode:1,decode:8,decode:32,decode:64,decode:128,prefill:1024,prefill:2048,prefill:8192"
FORMULAS, OWN, OTHER = "formulas", "recorded times", "without the node's size"
Row = dict[str, Any]


def merged(known: Row, files: Sequence[Row]) -> Row:
    """The recorded rows, with all rows of the timed ops replaced by those of the files.

    Raises ValueError where two files are of different machines.
    """
    if len(machines := {file["machine"] for file in files}) > 1:
        raise ValueError(f"times of {sorted(machines)}: give files of one machine")
    timed = [row for file in files for row in file["rows"] if row["us"]]
    rows = [row for row in known.get("rows", ()) if row["op"] not in {r["op"] for r in timed}]
    for row in timed:
        us = {name: min(times) for name, times in sorted(row["us"].items())}
        rows.append({"op": row["op"], "size": row["size"], "tokens": row["tokens"], "us": us})
    rows.sort(key=lambda row: (row["op"], row["size"], row["tokens"]))
    first = files[0]
    source = f"{', '.join(sorted({r['op'] for r in timed}))}: benchmarks.time_op, {first['commit']}"
    source = f"{source}, {first['date']}, {first['machine']}"
    return {**known, "source": [*known.get("source", ()), source], "rows": rows}


def text_of(times: Row) -> str:
    """The file's text, a line for each row."""
    head = json.dumps({k: v for k, v in times.items() if k != "rows"}, indent=1)[:-2]
    rows = ",\n".join(f"  {json.dumps(row)}" for row in times["rows"])
    return f'{head},\n "rows": [\n{rows}\n ]\n}}\n'


def chosen(work: Work, target: Target, hidden: int | None) -> str:
    """The tactic that a build takes for a node; `hidden`: a size without recorded times, 0 all."""
    rows = recorded._rows(target.architecture.name)
    shown = tuple(row for row in rows if hidden is None or (hidden and row[2] != hidden))
    for kept in (recorded._curves, recorded._range):
        kept.cache_clear()
    with patch.object(recorded, "_rows", lambda architecture: shown):
        able = [(t.cost(work.attrs, work.ins, target), t.name) for t, _ in takers(work, target)]
    for kept in (recorded._curves, recorded._range):
        kept.cache_clear()
    return min(able)[1]


def losses(models: Sequence[str], target: Target) -> Iterator[tuple[str, dict[str, float]]]:
    """(op, loss by what chooses) of every recorded node of the models: 0.05 is 5 % too long."""
    known = {(op, size, n): us for op, n, size, us in recorded._rows(target.architecture.name)}
    ops = {op for op, size, _ in known if size}
    for shape in shapes(models, sizes_of(AT), target, ops):
        work = shape.work
        at = takers(work, target)[0][0].size(work.attrs, work.ins, target)
        us = known.get((work.name, *at)) if at else None
        if us is None or at is None or len(us) < 2:
            continue
        found = {}
        for label, hidden in ((FORMULAS, 0), (OWN, None), (OTHER, at[0])):
            name = chosen(work, target, hidden)
            if name in us:
                found[label] = us[name] / min(us.values()) - 1
        yield work.name, found


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="of benchmarks.time_op --out")
    parser.add_argument("--architecture", default="sm_90a", help="the file in plugins/tuning")
    args = parser.parse_args(words)
    path = TUNING / f"{args.architecture}.json"
    if args.files:
        known = read(path) if path.is_file() else {}
        write(path, None, text_of(merged(known, [read(file) for file in args.files])))
        return
    card = read(path)["card"]
    rows = [*losses(MODELS, CARDS[card])]
    for op in sorted({op for op, _ in rows}):
        for label in (FORMULAS, OWN, OTHER):
            of_op = [found[label] for name, found in rows if name == op and label in found]
            mean, worst = fmean(of_op), max(of_op)
            print(f"{op}, {label}: mean {mean:.1%}, worst {worst:.1%}, {len(of_op)} nodes")


if __name__ == "__main__":
    main()
