"""`spark-replicas`: several engines behind one address.

Knows the command line; who places the replicas is in `replicas/ray_serve.py`, which needs the extra
`ray`, and who stands before them in `replicas/run.py`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import click

from spark_engine.command import OK, command
from spark_engine.engine_file import read_manifest
from spark_engine.errors import OptionError
from spark_engine.manifest import NATIVE
from spark_engine.runtime import config_file
from spark_engine.runtime.embedded import embedded_engine
from spark_engine.runtime.option import Group, Grouped
from spark_engine.runtime.options import OF_FILE, OPTIONS, server_options
from spark_engine.runtime.server.logs import LogFormat, LogLevel, set_up
from spark_engine.runtime.server.server import ServerOptions

NAME = "spark-replicas"
EXTRA = "pip install 'spark-engine[ray]'"
LOCAL = "127.0.0.1"
F = TypeVar("F", bound=Callable[..., Any])
_SERVING = (Group.ENGINE, Group.SERVER, Group.SECURITY, Group.LOGGING)
_NOT = ("--device", "--profile", "--hosts", "--rank")  # of one process on one machine
ROWS = tuple(r for r in OPTIONS if r.group in _SERVING and r.flag not in _NOT)
POLICIES = ("prefix", "least", "turn")
_BY = click.option(
    "--route-by",
    type=click.Choice(POLICIES),
    default="prefix",
    show_default=True,
    help="Who gets a request: the replica that holds its beginning, the freest, or the next.",
)
_RAY = click.option(
    "--ray", metavar="ADDRESS", help="The Ray cluster, e.g. auto or ray://HOST:10001."
)


@click.group()
@click.version_option(package_name="spark-engine", prog_name=NAME)
def main() -> None:
    """Several engines behind one address.

    `run` starts them, on this machine or in a Ray cluster, and the front before them; `front` alone
    stands before servers that run already. docs/scaling.md says what to use when.
    """


@main.command(
    cls=Grouped,
    rows=ROWS,
    params=[
        click.Argument(["engine"], type=click.Path(path_type=Path), required=False),
        *(row.parameter() for row in ROWS),
    ],
)
@config_file.option(
    NAME,
    OF_FILE,
    "Read options of the server from this TOML file, as spark-run has them.",
)
@click.option("--replicas", default="1", show_default=True, metavar="N|MIN-MAX", help="How many.")
@click.option(
    "--target",
    type=click.FloatRange(0, min_open=True),
    metavar="N",
    help="Requests that one replica is to have, where their number may change; by default as many "
    "as its engine decodes at once.",
)
@click.option(
    "--gpus",
    type=click.FloatRange(0),
    metavar="N",
    help="GPUs of each; by default as many as its engine has ranks.",
)
@click.option(
    "--cpus", type=click.FloatRange(0), default=1.0, show_default=True, help="CPUs of each."
)
@_RAY
@_BY
def run(
    engine: Path | None,
    replicas: str,
    target: float | None,
    gpus: float | None,
    cpus: float,
    ray: str | None,
    route_by: str,
    **values: Any,
) -> None:
    """Starts replicas of the engine folder ENGINE, and the front before them.

    Without --ray they stand on this machine. The options are those of spark-run --serve; host and
    port, TLS and connections are the front's, the others each replica's.
    """
    with command(NAME):
        from spark_engine.runtime.replicas.plan import Plan, counts

        serve, placing = _front(), _ray()
        options = _server_options(values)
        set_up(options.log_format, options.log_level)
        folder = (engine or _embedded()).resolve()
        manifest = read_manifest(folder)
        least, most = counts(replicas)
        own = replace(options, host=LOCAL if ray is None else "", page=options.page)
        each = (
            (float(manifest.ranks) if manifest.executor == NATIVE else 0.0)
            if gpus is None
            else gpus
        )
        wish = float(target or manifest.limits.max_seqs)
        plan = Plan(str(folder), own, least, most, each, cpus, wish)
        with placing.cluster(ray):
            placing.place(plan, known=ray is None)
            try:
                code = asyncio.run(serve(placing.members, route_by, options))
            finally:
                placing.remove()
        sys.exit(code)


@main.command()
@click.argument("urls", metavar="[URL]...", nargs=-1)
@click.option("--host", default=LOCAL, show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True)
@click.option("--max-connections", type=click.IntRange(1), default=2048, show_default=True)
@click.option("--drain-timeout", type=click.FloatRange(0), default=30.0, show_default=True)
@click.option("--tls-cert", type=click.Path(dir_okay=False), metavar="FILE")
@click.option("--tls-key", type=click.Path(dir_okay=False), metavar="FILE")
@click.option("--log-format", type=click.Choice([form.value for form in LogFormat]), default="text")
@_RAY
@_BY
def front(urls: tuple[str, ...], route_by: str, ray: str | None, **values: Any) -> None:
    """Stands before the servers at URL, or before what `run` placed in the cluster --ray.

    A URL is http://HOST:PORT, or dns://NAME:PORT for all addresses of a name. Nothing of Ray is
    needed for them.
    """
    with command(NAME):
        from spark_engine.runtime.replicas.fleet import listed

        if bool(urls) == (ray is not None):
            raise OptionError("say who stands behind: the servers' addresses, or --ray ADDRESS")
        options = ServerOptions(
            host=values["host"],
            port=values["port"],
            max_connections=values["max_connections"],
            drain_timeout_s=values["drain_timeout"],
            tls_cert=values["tls_cert"],
            tls_key=values["tls_key"],
        )
        set_up(LogFormat(values["log_format"]), LogLevel.INFO)
        serve = _front()
        if ray is None:
            sys.exit(asyncio.run(serve(listed(urls), route_by, options)))
        placing = _ray()
        with placing.cluster(ray):
            sys.exit(asyncio.run(serve(placing.members, route_by, options)))


@main.command()
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--ray", metavar="ADDRESS", default="auto", show_default=True)
def update(engine: Path, ray: str) -> None:
    """Replaces the engine by the folder ENGINE, replica after replica; requests go on."""
    with command(NAME):
        folder = engine.resolve()
        read_manifest(folder)
        _change(ray, folder=str(folder))


@main.command()
@click.argument("replicas", metavar="N|MIN-MAX")
@click.option("--ray", metavar="ADDRESS", default="auto", show_default=True)
def scale(replicas: str, ray: str) -> None:
    """Changes how many replicas there are."""
    with command(NAME):
        from spark_engine.runtime.replicas.plan import counts

        least, most = counts(replicas)
        _change(ray, least=least, most=most)


@main.command()
@click.option("--ray", metavar="ADDRESS", default="auto", show_default=True)
def status(ray: str) -> None:
    """Prints what is placed, and how it is, as JSON."""
    with command(NAME):
        placing = _ray()
        with placing.cluster(ray):
            plan = placing.placed()
            row = {"engine": plan.folder, "least": plan.least, "most": plan.most}
            addresses = {a.name: a.url for a in asyncio.run(placing.members())}
            row |= {"states": placing.states(), "replicas": addresses}
            click.echo(json.dumps(row, indent=1))
        sys.exit(OK)


def _change(address: str, **changed: Any) -> None:
    placing = _ray()
    with placing.cluster(address):
        placing.place(replace(placing.placed(), **changed), known=False)
        click.echo(json.dumps(placing.states()))


def _server_options(values: dict[str, Any]) -> ServerOptions:
    return server_options({row.name: row.default for row in OPTIONS} | values)


def _front() -> Any:
    """What serves; its library is an extra."""
    try:
        from spark_engine.runtime.replicas.routing import Policy
        from spark_engine.runtime.replicas.run import serve
    except ModuleNotFoundError as error:
        raise _missing(error, "aiohttp") from None
    return lambda members, by, options: serve(members, Policy(by), options)


def _ray() -> ModuleType:
    try:
        from spark_engine.runtime.replicas import ray_serve
    except ModuleNotFoundError as error:
        raise _missing(error, "ray") from None
    return ray_serve


def _missing(error: ModuleNotFoundError, library: str) -> Exception:
    if (error.name or "").partition(".")[0] not in (library, "aiohttp"):
        return error
    return OptionError(f"{error.name} is not installed: {EXTRA}")


def _embedded() -> Path:
    from spark_engine.runtime.cli import cache_folder

    return embedded_engine(cache_folder(), lambda text: click.echo(text, err=True))


if __name__ == "__main__":
    main()
