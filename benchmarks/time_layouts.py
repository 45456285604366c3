"""Steps and prefill of the layouts that people own, next to their byte floors, by one command.

`python -m benchmarks.time_layouts --out FILE` builds an engine of each layout (`published.py`) with
the buckets that are timed and no other, lets `time_step` time it into FILE, deletes it, and prints
a table: ms of a step at a context of 1,024, in parentheses its byte floor at this card's bandwidth
and what was asked, and tokens a second of a prompt of 8,192. A layout that does not build or fit is
named and passed over; after `--seconds` no other one starts. The same command continues: what FILE
has is not timed again.

`--plan` needs no GPU: the launches of each bucket, and the milliseconds of their costs; it raises
what a build would. `--work`: engines are built there, one at a time, and compiled kernels and times
of tactics stay there for the next call; /dev/shm spares the disk. The 122B's takes 83 GB.
"""

import argparse
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.byte_floors import H200_BANDWIDTH, floor_of
from benchmarks.result_files import read
from benchmarks.run_table import run
from benchmarks.weightless_plan import options, plan_of
from spark_engine.interface import PREFILL, PREFILL_TILE
from spark_engine.kernel import CARDS

CONTEXT, PROMPT = 1024, 8192
FEW, ALL = (1, 8, 32), (1, 8, 32, 64, 128)
STEPS = 16  # timed of each width
Key = tuple[str, int, int]  # layout, sequences, tokens of each
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Wanted:
    """A layout and what was asked of it: ms a step at `rows`, and tokens a second of a prompt; or
    the figures of the layout `like`, times `within`, with its KV cache of type `kv`."""

    layout: str
    rows: tuple[int, ...] = ALL
    steps: tuple[float, ...] = ()
    prefill: float = 0.0
    like: str = ""
    within: float = 1.0
    kv: str = "auto"

    @property
    def sizes(self) -> dict[str, Any]:
        context, most = PROMPT + 1024, max(self.rows)
        found = {"decode": self.rows, "prefill": (PROMPT,), "max_context": context, "drafts": 0}
        found |= {"max_seqs": most, "kv_tokens": max(most * (CONTEXT + 256), context)}
        return found | {"kv_dtype": self.kv}

    @property
    def keys(self) -> list[Key]:
        """What is timed: steps, then the prompt."""
        return [*((self.layout, n, CONTEXT) for n in self.rows), (self.layout, 1, PROMPT)]


LAYOUTS = (
    Wanted("27b:fp8-block", steps=(7.2, 7.8, 10.0, 13.5, 21.0), prefill=16_500),
    Wanted("35b-a3b:fp8-block", steps=(1.9, 3.9, 8.4, 11.6, 15.8), prefill=75_000),
    Wanted("27b:fp8-channel", like="27b:fp8-block"),
    Wanted("35b-a3b:fp8-channel", like="35b-a3b:fp8-block"),
    Wanted("27b:nvfp4"),
    Wanted("27b:int4-all", like="27b:nvfp4", within=1.08, kv="fp8"),
    Wanted("35b-a3b:int4-all"),
    Wanted("80b-a3b:nvfp4-experts", FEW),
    Wanted("122b-a10b:nvfp4-experts", FEW),
)


def command(wanted: Wanted, engine: Path, out: Path) -> str:
    """The command that builds an engine and times it."""
    given = {**wanted.sizes, "target": "sm_90a"}
    words = (
        f"--{name.replace('_', '-')} {','.join(map(str, v)) if isinstance(v, tuple) else v}"
        for name, v in given.items()
    )
    build = f"{' '.join(words)} --no-record"
    rows = ",".join(map(str, wanted.rows))
    return (
        f"python -m benchmarks.time_step {shlex.quote(str(engine))} {wanted.layout} "
        f"--build {shlex.quote(build)} --rows {rows} --ctx {CONTEXT} --prefill {PROMPT} "
        f"--steps {STEPS} --no-split --out {shlex.quote(str(out))}"
    )


def timed(out: Path) -> dict[Key, Row]:
    """The rows of a file."""
    rows = read(out)["rows"] if out.is_file() else ()
    return {(row["model"], row["npl"], row["ctx"]): row for row in rows}


def table(found: Mapping[Key, Row]) -> Iterator[str]:
    """The lines of the table; a layout of which nothing was timed has none."""
    yield f"| ms (floor; asked) | {' | '.join(map(str, ALL))} | tokens/s of {PROMPT} (asked) |"
    yield "|---|" + "---|" * (len(ALL) + 1)
    for wanted in LAYOUTS:
        cells = [""] * (len(ALL) + 1)
        for i, (layout, rows, tokens) in enumerate(wanted.keys):
            row = found.get((layout, rows, tokens))
            like = found.get((wanted.like, rows, tokens))
            if row is not None and tokens == PROMPT:
                asked = wanted.prefill or (like or {}).get("prefill_tok_s", 0.0) / wanted.within
                cells[-1] = f"{row['prefill_tok_s']:,.0f}" + (f" ({asked:,.0f})" if asked else "")
            elif row is not None:
                step = (like or {}).get("step_ms", 0.0) * wanted.within
                step = wanted.steps[i] if wanted.steps else step
                asked = f"; {step:.2f}" if step else ""
                cells[i] = f"{row['step_ms']:.2f} ({floor_here(row):.2f}{asked})"
        if any(cells):
            yield f"| {wanted.layout} | {' | '.join(cells)} |"


def floor_here(row: Row) -> float:
    """A row's floor in ms, at the bandwidth of the card that it was timed on."""
    cards = (t.bandwidth for t in CARDS.values() if row["card"].startswith(t.card.product))
    return floor_of(row) * H200_BANDWIDTH / next(cards, H200_BANDWIDTH)


def planned(wanted: Wanted) -> Iterator[str]:
    """A line for each bucket of a layout. Raises what a build raises."""
    asked = options("sm_90a", verify=None, **wanted.sizes)
    for bucket in plan_of(wanted.layout, asked, CONTEXT).values():
        tile = PREFILL_TILE if bucket.family == PREFILL else 1
        launches = sum(len(node.symbols) for node in bucket.nodes)
        cost = sum(node.cost for node in bucket.nodes) * 1e3
        size = f"{bucket.family} {bucket.rows * tile}"
        yield f"{wanted.layout} {size}: {launches} launches, {cost:.2f} ms by their costs"


def measure(wanted: Wanted, work: Path, out: Path, limit: float) -> str:
    """Builds, times and deletes an engine; a line that says how it went."""
    engine = work / wanted.layout.replace(":", "-")
    try:
        code, seconds = run({"limit": limit}, command(wanted, engine, out), work / "log")
    finally:
        shutil.rmtree(engine, ignore_errors=True)
    last = (work / "log" / "output.txt").read_text(errors="replace").strip().splitlines()[-1:]
    return f"{wanted.layout}: code {code}, {seconds:.0f} s" + (f": {last[0]}" if code else "")


def main(words: Sequence[str] | None = None) -> int:
    """The command; 1 where a layout was not timed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", help="some of them, a list")
    parser.add_argument("--out", type=Path, default=Path("layouts.json"), help="file of rows")
    parser.add_argument("--work", type=Path, help="folder of engines; default a temporary one")
    parser.add_argument(
        "--seconds", type=float, default=560, help="after which no other one starts"
    )
    parser.add_argument("--plan", action="store_true", help="launches and costs, without a GPU")
    args = parser.parse_args(words)
    names = args.layouts.split(",") if args.layouts else [one.layout for one in LAYOUTS]
    known = {one.layout: one for one in LAYOUTS}
    if unknown := [name for name in names if name not in known]:
        parser.error(f"--layouts {unknown[0]}: there are {', '.join(known)}")
    if args.plan:
        for name in names:
            print("\n".join(planned(known[name])), flush=True)
        return 0
    from benchmarks.graphs import target_here  # needs the extra `cuda`

    target_here()
    end, out = time.monotonic() + args.seconds, args.out.absolute()
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            left = end - time.monotonic()
            if not {*known[name].keys} <= {*timed(out)} and left > 0:
                print(measure(known[name], args.work or Path(scratch), out, left), flush=True)
    print("\n".join(table(timed(out))))
    return int(any(not {*known[name].keys} <= {*timed(out)} for name in names))


if __name__ == "__main__":
    sys.exit(main())
