"""`spark-build`: options in, a report out, errors as one line.

Knows the command line; the work is `build.build`. Exit codes: 0 built or unchanged, 2 something
the user can mend, 70 a bug of ours.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import click
from rich.console import Console

from spark_engine.builder.buckets import parse_sizes
from spark_engine.builder.build import build
from spark_engine.builder.options import KV_DTYPES, STATE_DTYPES, TARGETS, Options
from spark_engine.builder.report import Report, report_json, show_report
from spark_engine.errors import UserError

USER, BUG = 2, 70  # exit codes; 70 is EX_SOFTWARE of sysexits.h


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Engine folder to write.")
@click.option("--target", default="auto", help=f"auto, {', '.join(TARGETS)}.")
@click.option("--decode", help="Rows of the decode buckets, e.g. 1,2,4.")
@click.option("--prefill", help="Tokens of the prefill buckets, e.g. 64,256.")
@click.option("--max-context", type=int, help="Tokens of the longest sequence.")
@click.option("--max-seqs", type=int, help="Sequences alive at once.")
@click.option("--kv-tokens", type=int, help="Tokens in the KV pages, all sequences together.")
@click.option("--kv-dtype", default="auto", help=f"auto, {', '.join(KV_DTYPES)}.")
@click.option("--state-dtype", default="auto", help=f"auto, {', '.join(STATE_DTYPES)}.")
@click.option(
    "--gdn-ring",
    type=int,
    help="Tokens after which a recurrent state is rewritten, 0: every token; CUDA targets 8.",
)
@click.option("--no-fuse", is_flag=True, help="Leave every fusion out.")
@click.option("--debug", is_flag=True, help="Let every layer's output be read.")
@click.option(
    "--timing/--no-timing",
    default=None,
    help="Time tactics on this machine's GPU; by default where it is the target.",
)
@click.option(
    "--invariant",
    is_flag=True,
    help="Give a sequence the same bits whatever batch it runs in (CUDA targets).",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def main(
    checkpoint: Path,
    output: Path | None,
    decode: str | None,
    prefill: str | None,
    no_fuse: bool,
    as_json: bool,
    **rest: object,
) -> None:
    """Compiles the Hugging Face folder CHECKPOINT into an engine folder.

    The default output is engines/ and the checkpoint's name.
    """
    folder = output or Path("engines") / checkpoint.resolve().name

    def work() -> Report:
        sizes = {
            "decode": parse_sizes("--decode", decode) if decode is not None else None,
            "prefill": parse_sizes("--prefill", prefill) if prefill is not None else None,
        }
        options = Options(fuse=not no_fuse, **sizes, **rest)  # type: ignore[arg-type]
        return build(checkpoint, folder, options, lambda text: click.echo(text, err=True))

    report = _guarded(work)
    if as_json:
        click.echo(json.dumps(report_json(report), indent=1, sort_keys=True))
    else:
        show_report(Console(), report, str(folder))


def _guarded(work: Callable[[], Report]) -> Report:
    """Runs the work; what the user can mend is one line, what we must mend is a report."""
    try:
        return work()
    except (UserError, OSError) as error:  # OSError: a full disk, a folder that is not writable
        click.echo(f"spark-build: {error}", err=True)
        sys.exit(USER)
    except Exception as error:
        traceback.print_exc()
        click.echo(
            f"spark-build: {error}\nThis is a bug of spark-build. Please report it with the lines "
            "above and the command you ran.",
            err=True,
        )
        sys.exit(BUG)


if __name__ == "__main__":
    main()
