"""What a GB10 should do, from bytes and from how near to its floor an H200 came. Not run there.

A decode step is bound by bytes on both cards. Floor: the step's bytes at 243 GB/s, the best read
measured on a GB10 (nominal 273 GB/s), of an engine with a replay ring those that it moves.
Prediction: the floor over the fraction of its own floor that the H200 reached for the same model
and batch, as `bench_decode` recorded it. Launches cost a GB10 relatively less, its step being 18
times longer; its tensor cores and its caches are other ones, so a kernel's fraction may differ
either way.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.floors import GB10_BANDWIDTH, Floor, Work
from spark_engine.models.open_model import open_model

HERE = Path(__file__).parent
STATE_BYTES = {"f32": 4, "bf16": 2}
KV_BYTES = {"f8e4m3": 1, "bf16": 2}
Row = Mapping[str, Any]


def predict(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """One row for each measured one: floor, fraction and predicted milliseconds of a step."""
    floors: dict[str, Floor] = {}
    found = []
    for row in rows:
        model = row["model"]
        if model not in floors:
            floors[model] = Floor(open_model(HERE / "configs" / model))
        state, kv = STATE_BYTES[row["gdn_state"]], KV_BYTES[row["kv"]]
        work = Work(row["npl"], row["ctx"], state, kv, row.get("gdn_ring", 0))
        floor = floors[model].seconds(work, GB10_BANDWIDTH) * 1e3
        fraction = row.get("ring_floor_ms", row["floor_ms"]) / row["step_ms"]
        found.append(
            {
                "model": model,
                "npl": row["npl"],
                "gdn_state": row["gdn_state"],
                "kv": row["kv"],
                "floor_ms": round(floor, 1),
                "fraction": round(fraction, 3),
                "step_ms": round(floor / fraction, 1),
                "decode_tok_s": round(row["npl"] / (floor / fraction) * 1e3, 1),
            }
        )
    return found


def table(rows: Iterable[Row]) -> str:
    """The predictions as Markdown."""
    lines = [
        "| model | npl | state | KV | floor ms | of its floor (H200) | predicted ms | tok/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['model']} | {r['npl']} | {r['gdn_state']} | {r['kv']} | {r['floor_ms']} "
        f"| {r['fraction']:.0%} | {r['step_ms']} | {r['decode_tok_s']} |"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = HERE / "results" / "decode_h200.json"
    parser.add_argument("results", type=Path, nargs="?", default=default)
    rows = json.loads(parser.parse_args().results.read_text())["rows"]
    print("GB10, decode at 1,024 tokens of context: predicted, not run.\n")
    print(
        table(predict(sorted(rows, key=lambda r: (r["model"], r["gdn_state"], r["kv"], r["npl"]))))
    )


if __name__ == "__main__":
    main()
