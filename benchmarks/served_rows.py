"""Bursts over HTTP: tokens a second of each sequence, and how long first tokens take.

`python -m benchmarks.served_rows ENGINE [--rows 8,32,64,128] [--out FILE]` serves the engine and
asks it with `spark-bench`'s clients: so many prompts of 128 random ids at once, 160 tokens each
(`--input`, `--output`), three times over, after a burst that is not counted. A line a width: the
median, and least to most. "While all decode" is what stands beside a step in lockstep.
With `--forms 4` every fourth answer is held to a JSON schema, which the engine's tokenizer must be
there for; its string takes any number of tokens, so that random weights do not end it early.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from spark_engine.bench import machine
from spark_engine.bench.load import Arrivals, Load, Plan
from spark_engine.bench.measure import measure
from spark_engine.bench.prompts import Ids, Shape, draw
from spark_engine.bench.target import ask, started
from spark_engine.engine_file import read_manifest
from spark_engine.progress import Progress

REPEATS, PROCESSES = 3, 4
Row = dict[str, Any]


def burst(rows: int, shape: Shape, ids: Ids, forms: int, rng: Random, mark: str) -> Load:
    """`rows` requests at once; of every `forms`, where that is not 0, one has a JSON schema."""
    load = Arrivals(burst=rows).spread(draw(shape, rows, ids, False, rng), {}, rng)
    if not forms:
        return load
    title = {"type": "string", "minLength": 4 * shape.output[1]}
    schema = {"type": "object", "properties": {"title": title}, "required": ["title"]}
    more = {"guided_json": schema}
    scripts = (s if i % forms else replace(s, more=more) for i, s in enumerate(load.scripts))
    return replace(load, scripts=tuple(scripts))


def row_of(rows: int, result: Row) -> Row:
    """What is kept of a width; each figure as its median, least and most."""
    spread = result["spread"]
    tpot = spread["tpot.p50"]
    return {
        "rows": rows,
        "tok_s_each": [1e3 / tpot[i] for i in (0, 2, 1)],
        "tok_s": spread["output_tok_s"],
        "full_tok_s": spread.get("full_tok_s"),
        "ttft_p50_ms": spread["ttft.p50"],
        "ttft_p99_ms": spread["ttft.p99"],
        "itl_p99_ms": spread["itl.p99"],
        "warning": next((w for r in result["runs"] if (w := r["client"]["warning"])), None),
        "card": [run["card"] for run in result["runs"]],
    }


def line(row: Row) -> str:
    """For a person."""

    def told(name: str, digits: int) -> str:
        median, least, most = (f"{value:,.{digits}f}" for value in row[name])
        return f"{median} ({least} to {most})"

    words = f"{row['rows']:4d}: {told('tok_s_each', 1)} tokens/s each, {told('tok_s', 0)} together"
    if row["full_tok_s"]:
        words += f", {told('full_tok_s', 0)} while all decode"
    words += f"; ms to the first token p50 {told('ttft_p50_ms', 0)}, p99 {told('ttft_p99_ms', 0)}"
    return f"{words}; {row['warning']}" if row["warning"] else words


def main() -> None:
    """Prints a line for each width, and keeps them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--rows", default="8,32,64,128")
    parser.add_argument("--forms", type=int, default=0, help="every Nth answer has a JSON schema")
    parser.add_argument("--input", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=160, help="tokens of an answer")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    vocab = read_manifest(given.engine).limits.vocab
    shape = Shape((given.input, given.input), output=(given.output, given.output))
    found = []
    with started(given.engine, (), lambda words: print(words, file=sys.stderr)) as url:
        target = ask(url, None, None)
        for rows in map(int, given.rows.split(",")):
            make = partial(burst, rows, shape, Ids(vocab), given.forms)
            plan = Plan(make, given.input + given.output, REPEATS, rows, PROCESSES, {}, seed=rows)
            found.append(row_of(rows, measure(target, plan, Progress(None))))
            print(line(found[-1]), flush=True)
    if given.out:
        head = {"engine": given.engine.name, "date": date.today().isoformat(), "forms": given.forms}
        head |= {"input": given.input, "output": given.output}
        given.out.write_text(json.dumps({**head, "card": machine.card(), "rows": found}) + "\n")


if __name__ == "__main__":
    main()
