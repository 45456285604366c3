"""The command."""

import tempfile
from pathlib import Path

import click

from benchmarks import accuracy
from benchmarks.accuracy.engines import CHUNK
from benchmarks.accuracy.measure import FILE, Saved, compare, measure_embedded
from benchmarks.accuracy.snapshots import measure_snapshots
from benchmarks.accuracy.state_error import state_errors

MARKS = (1_000, 10_000)  # tokens at which the states' error is shown, and at the end


@click.command(help=str(accuracy.__doc__).split("\n\n")[0])
@click.option("--tokens", default=100_000, show_default=True, help="judged, of each row at least")
@click.option("--contexts", default="1024,16384,65536", show_default=True)
@click.option(
    "--only", type=click.Choice(("states", "random", "embedded", "snapshots")), help="one table"
)
@click.option("--file", type=click.Path(path_type=Path), default=FILE, show_default=True)
def main(tokens: int, contexts: str, only: str | None, file: Path) -> None:
    saved, lengths = Saved(file), [int(n) for n in contexts.split(",")]
    if odd := [n for n in lengths if n <= 0 or n % CHUNK]:
        raise click.BadParameter(f"{odd} are no multiples of {CHUNK}", param_hint="--contexts")
    with tempfile.TemporaryDirectory() as name:
        if only in (None, "states") and not saved.has("states", "", tokens):
            rows = state_errors([n for n in MARKS if n < tokens] + [tokens])
            saved.add("states", "", {"asked": tokens, "rows": rows})
        if only in (None, "embedded"):
            measure_embedded(Path(name), tokens, saved)
        if only in (None, "snapshots"):
            measure_snapshots(Path(name), tokens, saved)
        for context in lengths if only in (None, "random") else ():
            compare(Path(name), context, tokens, saved)


if __name__ == "__main__":
    main()
