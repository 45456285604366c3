"""`spark-inspect ENGINE`: the manifest of an engine folder, for a person or as JSON.

Knows the command line; reads the manifest, and holds the length of each file against it: what is
cut or missing is said after the manifest is shown, and the exit code is 2.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console

from spark_engine.builder.report import render
from spark_engine.command import command
from spark_engine.engine_file import read_manifest, verify_files
from spark_engine.manifest import canonical_json


@click.command()
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")
@click.version_option(package_name="spark-engine", prog_name="spark-inspect")
def main(engine: Path, as_json: bool) -> None:
    """Shows what the engine folder ENGINE holds."""
    with command("spark-inspect"):
        manifest = read_manifest(engine)
        if as_json:
            sys.stdout.write(canonical_json(manifest.to_json()).decode())
        else:
            Console().print(render(manifest))
        sys.stdout.flush()
        verify_files(engine, manifest.files, deferred=manifest.files)  # lengths alone
