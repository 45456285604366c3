"""`spark-inspect ENGINE`: prints the manifest of an engine folder, and a bucket's launches.

Knows the command line. Reads the manifest and compares the length of each file with it: missing and
truncated files are reported after the manifest, and the exit code is 2. With `--bucket` it reads
that bucket's file and prints its launches, or one of them with its sources.
"""

import sys
from pathlib import Path

import click
from rich.console import Console

from spark_engine.builder.native.launches import bucket_of, describe, launches, listing
from spark_engine.builder.report import render
from spark_engine.command import command
from spark_engine.engine_file import read_engine, read_manifest, verify_files
from spark_engine.errors import OptionError
from spark_engine.manifest import Bucket, Manifest, canonical_json


@click.command()
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")
@click.option("--bucket", metavar="FILE", help="List the launches of a bucket, e.g. decode_b1.")
@click.option("--launch", type=int, metavar="N", help="The sources of launch N of that bucket.")
@click.version_option(package_name="spark-engine", prog_name="spark-inspect")
def main(engine: Path, as_json: bool, bucket: str | None, launch: int | None) -> None:
    """Shows what the engine folder ENGINE holds."""
    with command("spark-inspect"):
        manifest = read_manifest(engine)
        if launch is not None and bucket is None:
            raise OptionError("--launch: name its bucket too, e.g. --bucket decode_b1")
        if bucket is not None:
            show_launches(engine, bucket_of(manifest, bucket), manifest, launch)
        elif as_json:
            sys.stdout.write(canonical_json(manifest.to_json()).decode())
        else:
            Console().print(render(manifest))
        sys.stdout.flush()
        verify_files(engine, manifest.files, deferred=manifest.files)  # lengths alone


def show_launches(engine: Path, bucket: Bucket, manifest: Manifest, number: int | None) -> None:
    found = launches(read_engine(engine / bucket.file).payload)
    if number is None:
        click.echo(listing(found))
    else:
        click.echo(describe(found, number, manifest.tactics, bucket.file))
