"""`spark-inspect ENGINE`: the manifest of an engine folder, for a person or as JSON.

Knows the command line; reads the manifest only, so a damaged weights file does not stop it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console

from spark_engine.builder.report import render
from spark_engine.engine_file import read_manifest
from spark_engine.errors import UserError
from spark_engine.manifest import canonical_json


@click.command()
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")
def main(engine: Path, as_json: bool) -> None:
    """Shows what the engine folder ENGINE holds."""
    try:
        manifest = read_manifest(engine)
    except UserError as error:
        click.echo(f"spark-inspect: {error}", err=True)
        sys.exit(2)
    if as_json:
        sys.stdout.write(canonical_json(manifest.to_json()).decode())
        return
    Console().print(render(manifest))
