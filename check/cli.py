"""`spark-check`: is an engine as exact as it should be, and if not, where does it go wrong.

Knows the command line. Exit codes: 0 no divergence, 1 a divergence, 2 something the user can
mend, 70 a bug of ours, 130 and 143 interrupted by Ctrl-C and SIGTERM (nothing is left behind).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from pathlib import Path

import click
from rich.console import Console

# Before numpy comes: references multiply small matrices, on which its threads wait for one another
# five times longer than they compute.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from spark_engine.check.progress import bars, lines
from spark_engine.check.report import show
from spark_engine.errors import InternalError, UserError

DIVERGED, USER, BUG, INTERRUPTED, TERMINATED = 1, 2, 70, 130, 143


@click.command()
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--against", type=click.Path(path_type=Path), help="A checkpoint or an engine.")
@click.option(
    "--level",
    type=click.Choice(["op", "layer", "model", "text", "all"]),
    default="all",
    show_default=True,
)
@click.option("--seed", default=0, help="Of the random prompts.", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def main(engine: Path, against: Path | None, level: str, seed: int, as_json: bool) -> None:
    """Compares the engine folder ENGINE with its own float64 references.

    With --against CHECKPOINT the checkpoint is built anew, unfused, and computed by reference;
    with --against ENGINE the other engine is run. A native engine has no references of its own:
    give its checkpoint, or a CPU engine (without its op level). Names every module whose op
    differs by itself, then the first layer that does, and counts tokens that differ.
    """
    try:  # polygraphy is an extra, and --help must work without it
        from spark_engine.check.check import LEVELS, run_check
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "polygraphy":
            raise
        click.echo("spark-check: needs polygraphy: pip install 'spark-engine[check]'", err=True)
        sys.exit(USER)
    levels = LEVELS if level == "all" else (level,)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # unwinds: folders are removed
    errors = Console(stderr=True)
    say = errors.print if errors.is_terminal else _say
    track = bars(errors) if errors.is_terminal else lines(_say)
    try:
        report = run_check(engine, against, levels, say, seed, track)
    except KeyboardInterrupt:
        click.echo("spark-check: interrupted", err=True)
        sys.exit(INTERRUPTED)
    except UserError as error:
        click.echo(f"spark-check: {error}", err=True)
        sys.exit(USER)
    except InternalError as error:
        traceback.print_exc()
        click.echo(f"spark-check: {error}\nThis is a bug. Please report the lines above.", err=True)
        sys.exit(BUG)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=1, sort_keys=True))
    else:
        # Narrower than this, figures would be cut; a pipe has no width of its own.
        show(report, Console(width=max(Console().width, 120)))
    sys.exit(0 if report.passed else DIVERGED)


def _say(text: str) -> None:
    click.echo(text, err=True)


if __name__ == "__main__":
    main()
