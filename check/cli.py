"""`spark-check`: is an engine as exact as it should be, and if not, where does it go wrong.

Knows the command line; `command` says how it ends. Exit codes: 0 no divergence, 3 a divergence.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import click
from rich.console import Console

# Before numpy comes: references multiply small matrices, on which its threads wait for one another
# five times longer than they compute.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from spark_engine.check.report import show
from spark_engine.command import DIVERGED, OK, command
from spark_engine.errors import OptionError
from spark_engine.progress import Progress


@click.command()
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--against", type=click.Path(path_type=Path), help="A checkpoint or an engine.")
@click.option(
    "--level",
    type=click.Choice(["op", "layer", "model", "text", "record", "all"]),
    default="all",
    show_default=True,
)
@click.option("--seed", default=0, help="Of the random prompts.", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.version_option(package_name="spark-engine", prog_name="spark-check")
def main(engine: Path, against: Path | None, level: str, seed: int, as_json: bool) -> None:
    """Compares the engine folder ENGINE with its own float64 references.

    With --against CHECKPOINT the checkpoint is built anew, unfused, and computed by reference;
    with --against ENGINE the other engine is run. A native engine has no references of its own:
    give its checkpoint, or a CPU engine (without its op level). Names every module whose op
    differs by itself, then the first layer that does, and counts tokens that differ.
    """
    with command("spark-check"):
        try:  # polygraphy is an extra, and --help must work without it
            from spark_engine.check.check import LEVELS, run_check
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] != "polygraphy":
                raise
            words = "polygraphy is not installed: pip install 'spark-engine[check]'"
            raise OptionError(words) from error
        levels = LEVELS if level == "all" else (level,)
        with Progress(sys.stderr) as shown:
            report = run_check(engine, against, levels, shown, seed)
        if as_json:
            click.echo(json.dumps(report.to_json(), indent=1, sort_keys=True))
        else:
            # Narrower than this, figures would be cut; a pipe has no width of its own.
            show(report, Console(width=max(Console().width, 120)))
        sys.exit(OK if report.passed else DIVERGED)


if __name__ == "__main__":
    main()
