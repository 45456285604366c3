"""`spark-replicas`: several engines behind one address.

Knows the command line; `replicas/ray_serve.py`, which needs the extra `ray`, places the replicas,
and `replicas/front_process.py` is the front.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from socket import socket
from types import ModuleType
from typing import Any, TypeVar

import click

from spark_engine.command import OK, command
from spark_engine.engine_file import read_manifest
from spark_engine.errors import OptionError
from spark_engine.hints import extra
from spark_engine.runtime.cli.options import config_file
from spark_engine.runtime.cli.options.option import Finite, Group, Grouped, fill
from spark_engine.runtime.cli.options.run_options import OF_FILE, OPTIONS, server_options
from spark_engine.runtime.offline.embedded import cache_folder, embedded_engine
from spark_engine.runtime.server.operation.json_stderr import standard_error
from spark_engine.runtime.server.operation.logs import LogFormat, set_up
from spark_engine.runtime.server.process.options import ServerOptions

NAME = "spark-replicas"
LOCAL = "127.0.0.1"
F = TypeVar("F", bound=Callable[..., Any])
_SERVING = (Group.ENGINE, Group.MEASURING, Group.SERVER, Group.SECURITY, Group.LOGGING)
# Options of one process on one machine.
_NOT = ("--device", "--profile", "--hosts", "--rank", "--cache-dir", "--cache-dir-gib")
ROWS = tuple(r for r in OPTIONS if r.group in _SERVING and r.flag not in _NOT)
# Of a front for servers that run already.
_OF_FRONT = (
    *("--host", "--port", "--max-connections", "--drain-timeout", "--allowed-hosts"),
    *("--tls-cert", "--tls-key", "--log-format"),
)
FRONT = tuple(r for r in OPTIONS if r.flag in _OF_FRONT)
POLICIES = ("prefix", "least", "turn")
_BY = click.option(
    "--route-by",
    type=click.Choice(POLICIES),
    default="prefix",
    help="To which replica a request goes: prefix, one that has its beginning cached; least, the "
    "one with the least load; turn, the next one.",
)
_TARGET = click.option(
    "--target",
    type=Finite(0, min_open=True),
    metavar="N",
    help="Requests for each replica, if their number may change; by default as many "
    "as its engine decodes at once.",
)
_GPUS = click.option(
    "--gpus",
    type=Finite(0),
    metavar="N",
    help="GPUs of each replica; by default as many as its engine has ranks.",
)
_RAY = click.option(
    "--ray", metavar="ADDRESS", help="The Ray cluster, e.g. auto or ray://HOST:10001."
)
_NUMBER = "Replicas: a number, or a range within which load decides."
_CLUSTER = click.option("--ray", metavar="ADDRESS", default="auto", help="The Ray cluster.")


@click.group(context_settings={"show_default": True})
@click.version_option(package_name="spark-engine", prog_name=NAME)
def main() -> None:
    """Several engines behind one address.

    `run` starts them, on this machine or in a Ray cluster, and a front; `front` alone serves
    servers that run already. docs/operate/scaling.md says what to use when.
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
    NAME, OF_FILE, "Read options of the server from this TOML file, as spark-run has them."
)
@click.option("--replicas", default="1", metavar="N|MIN-MAX", help=_NUMBER)
@_TARGET
@_GPUS
@click.option("--cpus", type=Finite(0), default=1.0, help="CPUs of a replica.")
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
    """Starts replicas of the engine folder ENGINE, and the front.

    Without --ray they run on this machine. The options are those of spark-run --serve; host and
    port, TLS and connections are the front's, the others each replica's.
    """
    with standard_error(LogFormat(values["log_format"])), command(NAME):
        from spark_engine.runtime.replicas.plan import ReplicaPlan, counts, sizes, stamp_of

        serving, placing = _extra("front_process", "aiohttp"), _extra("ray_serve", "ray")
        options = server_options({row.name: row.default for row in OPTIONS} | values)
        set_up(options.log_format, options.log_level)
        folder = (engine or _embedded()).resolve()
        manifest = read_manifest(folder)
        least, most = counts(replicas)
        names = options.names or (manifest.name,)  # an update does not change the model's name
        own = replace(options, host=LOCAL if ray is None else "", names=names)
        own = replace(own, api_keys=_absolute(own.api_keys), dumps=_absolute(own.dumps))
        plan = ReplicaPlan(
            str(folder),
            own,
            least,
            most,
            cpus=cpus,
            stamp=stamp_of(manifest),
            known=ray is None,
            **sizes(manifest, gpus=gpus, target=target),
        )
        listener = serving.listen(options)  # before placing, which takes minutes
        with contextlib.closing(listener), placing.cluster(ray):
            placing.check_free()
            try:
                placing.place(plan)
                code = _serve(serving, listener, _members(placing), route_by, options)
            finally:
                placing.remove()
        sys.exit(code)


@main.command(
    params=[
        click.Argument(["urls"], metavar="[URL]...", nargs=-1),
        *(row.parameter() for row in FRONT),
    ]
)
@_RAY
@_BY
def front(urls: tuple[str, ...], route_by: str, ray: str | None, **values: Any) -> None:
    """Starts a front for the servers at URL, or for the replicas of `run` in the cluster --ray.

    A URL is http://HOST:PORT, or dns://NAME:PORT for all addresses of a name. They do not need Ray.
    """
    with standard_error(LogFormat(values["log_format"])), command(NAME):
        from spark_engine.runtime.replicas.fleet import listed

        if bool(urls) == (ray is not None):
            raise OptionError("name the replicas: the servers' addresses, or --ray ADDRESS")
        # the servers check pages and keys
        options = fill(ServerOptions, FRONT, values, cors_origins=("*",))
        set_up(options.log_format, options.log_level)
        serving = _extra("front_process", "aiohttp")
        with contextlib.closing(serving.listen(options)) as listener:
            if ray is None:
                sys.exit(_serve(serving, listener, listed(urls), route_by, options))
            placing = _extra("ray_serve", "ray")
            with placing.cluster(ray):
                sys.exit(_serve(serving, listener, _members(placing), route_by, options))


@main.command()
@click.argument("engine", type=click.Path(path_type=Path))
@_GPUS
@_TARGET
@_CLUSTER
def update(engine: Path, gpus: float | None, target: float | None, ray: str) -> None:
    """Replaces the engine by the folder ENGINE, replica by replica, while requests run.

    If the new engine does not start, the old one is placed again.
    """
    with command(NAME):
        from spark_engine.runtime.replicas.plan import moved

        folder = engine.resolve()
        manifest = read_manifest(folder)
        _change(ray, lambda plan: moved(plan, str(folder), manifest, gpus=gpus, target=target))


@main.command()
@click.argument("replicas", metavar="N|MIN-MAX")
@_CLUSTER
def scale(replicas: str, ray: str) -> None:
    """Changes the number of replicas, or its range."""
    with command(NAME):
        from spark_engine.runtime.replicas.plan import counts

        least, most = counts(replicas)
        _change(ray, lambda plan: replace(plan, least=least, most=most))


@main.command()
@_CLUSTER
def remove(ray: str) -> None:
    """Ends replicas that are left of a `run` that has ended; their requests finish first."""
    with command(NAME):
        placing = _extra("ray_serve", "ray")
        with placing.cluster(ray):
            placing.remove()


@main.command()
@_CLUSTER
def status(ray: str) -> None:
    """Prints the replicas and their state as JSON."""
    with command(NAME):
        placing = _extra("ray_serve", "ray")
        with placing.cluster(ray):
            plan = placing.placed()
            row = {"engine": plan.folder, "least": plan.least, "most": plan.most}
            row |= {"gpus": plan.gpus, "target": plan.target}
            row |= {"states": placing.states(), "replicas": dict(placing.named()[0])}
            click.echo(json.dumps(row, indent=1))
        sys.exit(OK)


def _absolute(path: str | None) -> str | None:
    """The absolute path: a replica's process has another working directory."""
    return path and str(Path(path).absolute())


def _change(address: str, edit: Callable[[Any], Any]) -> None:
    placing = _extra("ray_serve", "ray")
    with placing.cluster(address):
        placing.change(edit)
        click.echo(json.dumps(placing.states()))


def _serve(
    serving: ModuleType, listener: socket, members: Any, by: str, options: ServerOptions
) -> int:
    from spark_engine.runtime.replicas.routing import Policy

    return int(asyncio.run(serving.serve(listener, members, Policy(by), options)))


def _members(placing: ModuleType) -> Any:
    from spark_engine.runtime.replicas.directory import Members

    return Members(placing.named)


def _extra(name: str, library: str) -> ModuleType:
    """A module of `replicas` that needs a library of the extra `ray`."""
    try:
        return import_module(f"spark_engine.runtime.replicas.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in (library, "aiohttp"):
            raise
        raise OptionError(f"{error.name} is not installed: {extra('ray')}") from None


def _embedded() -> Path:
    return embedded_engine(cache_folder(os.environ), lambda text: click.echo(text, err=True))


if __name__ == "__main__":
    main()
