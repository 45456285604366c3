"""`spark-check`: whether an engine is as exact as it should be, and if not, where it diverges.

Knows the command line; `command` defines how it ends. Exit codes: 0 no divergence, 3 a divergence.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console

# Before numpy is imported: in the references' small matrix products, numpy's threads wait five
# times longer than they compute.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from spark_engine.check.verdicts.report import show
from spark_engine.command import DIVERGED, OK, command
from spark_engine.device.choice import HELP, choose
from spark_engine.errors import OptionError
from spark_engine.hints import extra
from spark_engine.progress import Progress


@click.command(context_settings={"show_default": True})
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--against", type=click.Path(path_type=Path), help="A checkpoint or an engine.")
@click.option(
    "--level",
    type=click.Choice(["op", "layer", "model", "text", "record", "all"]),
    default="all",
    help="What is compared (see above).",
)
@click.option(
    "--repeat",
    type=click.IntRange(1),
    metavar="N",
    help="Instead of a comparison: serve the same requests N more times, and print how often "
    "a text differs.",
)
@click.option("--device", type=click.IntRange(0), metavar="N", help=HELP)
@click.option("--seed", default=0, help="Seed of the random prompts.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.version_option(package_name="spark-engine", prog_name="spark-check")
@click.pass_context
def main(
    context: click.Context,
    engine: Path,
    against: Path | None,
    level: str,
    repeat: int | None,
    device: int | None,
    seed: int,
    as_json: bool,
) -> None:
    """Compares the engine folder ENGINE with its own float64 references.

    With --against CHECKPOINT it builds the checkpoint again, unfused, and computes it by the
    references; with --against ENGINE it runs the other engine. A native (GPU) engine has no
    references: give its checkpoint, or a CPU engine of it, with which there is no op level.

    Levels: op names every module that differs when its op runs alone; layer names the first layer
    that differs; model compares logits; text counts the tokens that differ; record checks whether
    every bucket still generates the tokens of the engine's build.

    Every table names its limits; the text after the tables explains each figure. In a near tie
    the reference gives a token the same likelihood as its own choice, within rounding.
    """
    with command("spark-check"):
        choose(os.environ, device)
        try:  # polygraphy is an extra; --help works without it
            from spark_engine.check.check import LEVELS, run_check, run_repeat
            from spark_engine.check.texts.repeat import show_repeated
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] != "polygraphy":
                raise
            raise OptionError(f"polygraphy is not installed: {extra('check')}") from error
        # Narrower tables cut figures; a pipe has no width.
        console = Console(width=max(Console().width, 120))
        if repeat is not None:
            _refuse_compared(context)
            with Progress(sys.stderr) as shown:
                found = run_repeat(engine, repeat, shown, seed)
            _print(found.to_json(), as_json, lambda: show_repeated(found, console))
            sys.exit(OK if found.passed else DIVERGED)
        levels = LEVELS if level == "all" else (level,)
        with Progress(sys.stderr) as shown:
            report = run_check(engine, against, levels, shown, seed)
        _print(report.to_json(), as_json, lambda: show(report, console))
        sys.exit(OK if report.passed else DIVERGED)


def _refuse_compared(context: click.Context) -> None:
    """Raises OptionError for options without effect when an engine is compared with itself."""
    for name in ("against", "level"):
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            words = "with --repeat, which compares an engine with itself: leave it out"
            raise OptionError(f"--{name} does nothing {words}")


def _print(row: dict[str, Any], as_json: bool, show_it: Callable[[], None]) -> None:
    if as_json:
        click.echo(json.dumps(row, indent=1, sort_keys=True))
    else:
        show_it()


if __name__ == "__main__":
    main()
