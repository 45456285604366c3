"""`spark-run doctor`: describes this machine, its problems, and the engines it can serve.

Knows the command line. Exits with 0 if an engine can be served and 1 otherwise; other codes are
those of every command.
"""

import json
import os
import sys
from pathlib import Path

import click

from spark_engine.command import command
from spark_engine.device.choice import HELP, choose
from spark_engine.runtime.cli.options.option import Finite
from spark_engine.runtime.doctor import engines, gpu, machine
from spark_engine.runtime.doctor.report import DoctorReport, roots

NAME = "doctor"
GIB = 1 << 30
SERVED, NONE_SERVED = 0, 1


@click.command(NAME)
@click.argument(
    "folders", metavar="[ENGINE]...", nargs=-1, type=click.Path(path_type=Path, file_okay=False)
)
@click.option("--device", type=click.IntRange(0), metavar="N", help=HELP)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--host-gib",
    type=Finite(0),
    metavar="G",
    help="GiB left to the host if the GPU shares its memory; by default 10.",
)
@click.option(
    "--cache-dir",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Examine also this folder of spark-run --cache-dir.",
)
@click.option("--no-load", is_flag=True, help="Do not work on the GPU: no clock, no bandwidth.")
def doctor(
    folders: tuple[Path, ...],
    device: int | None,
    as_json: bool,
    host_gib: float | None,
    cache_dir: Path | None,
    no_load: bool,
) -> None:
    """Checks this machine: which engines it can serve, and what to do where it cannot.

    The engines are the folders ENGINE, or all under engines/. The GPU works for about a second.
    Ends with 0 where an engine can be served, with 1 where none can.
    """
    with command(f"spark-run {NAME}"):
        name = choose(os.environ, device)
        host_bytes = None if host_gib is None else int(host_gib * GIB)
        report = examine(folders, not no_load, name or "0", host_bytes, cache_dir)
        if as_json:
            click.echo(json.dumps(report.to_json(), indent=2))
        else:
            for line in report.lines():
                click.echo(line)
        sys.exit(SERVED if report.served else NONE_SERVED)


def examine(
    folders: tuple[Path, ...],
    load: bool,
    device: str = "0",
    host_bytes: int | None = None,
    prefixes: Path | None = None,
) -> DoctorReport:
    """Checks everything; with `load` the GPU works for a second. `device`: its name for nvidia-smi.
    `host_bytes`: reserved for the host where GPU and host share memory; None: the default.
    `prefixes`: a folder of the prefix cache."""
    host, found = machine.host(), gpu.diagnose(load, device, host_bytes)
    paths = engines.folders(folders)
    total = found.card.memory if found.card else None
    places, cache = roots(folders, engines.ENGINES), machine.hub_cache(os.environ)
    apart = not any(machine.same_disk(cache, place) for place in places)
    return DoctorReport(
        host=host,
        gpu=found,
        extras=machine.extras(),
        disk={str(path): machine.disk(path) for path in (*places, *([cache] if apart else []))},
        prefixes={} if prefixes is None else {str(prefixes): machine.prefixes(prefixes)},
        engines=[engines.fit(path, total, host.available, found.why, host_bytes) for path in paths],
        hub_cache=str(cache) if apart else None,
    )
