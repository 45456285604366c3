"""The options of `spark-run`, one row each: the table makes the command line, its help, the
configuration file, and the options of the engine and the server.

A new option is a row here and the field that it fills, which has the option's default.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import click

from spark_engine.device.choice import HELP
from spark_engine.errors import OptionError
from spark_engine.interface import MOST_DRAFTS
from spark_engine.runtime.cli.options.answer_options import ANSWER, CHAT
from spark_engine.runtime.cli.options.operation_options import KEYS, LOGGING
from spark_engine.runtime.cli.options.option import MANY, SERVING, Group, Option, fill
from spark_engine.runtime.engine.engine import EngineOptions
from spark_engine.runtime.engine.policy.pacing import Pace, PrefillPolicy
from spark_engine.runtime.server.api.common import Body
from spark_engine.runtime.server.http.host_names import allowed_hosts
from spark_engine.runtime.server.process.options import ServerOptions
from spark_engine.runtime.server.prompts.conversation import ChatOptions

GIB, MOST_GIB = 1 << 30, 1 << 20
_ORIGIN = re.compile(r"https?://[^/\s:]+(:\d+)?|https?://\[[0-9a-fA-F:]+\](:\d+)?")
_ABOVE_0 = click.FloatRange(0, min_open=True)

# The argument of the command line, and a key of the configuration file.
FOLDER = Option(
    "--engine", Group.TASK, "The engine folder; the embedded model by default.", metavar="FOLDER"
)
TASK = (
    Option("--prompt", Group.TASK, "Continue this text; - reads standard input."),
    Option("--prompt-ids", Group.TASK, "Continue these token ids, e.g. 1,2,3."),
    Option("--chat", Group.TASK, "Answer this message; - reads standard input."),
    Option(
        "--serve", Group.TASK, "Serve the OpenAI and Anthropic APIs, and a page, over HTTP.", bool
    ),
)
ENGINE = (
    Option("--device", Group.ENGINE, HELP, click.IntRange(0), metavar="N"),
    Option(
        "--tp",
        Group.ENGINE,
        "Ranks that the engine must have, each on a GPU; by default as many as it was built for.",
        click.IntRange(1),
        metavar="N",
        fills=(EngineOptions, "tp"),
    ),
    Option(
        "--hosts",
        Group.ENGINE,
        "Host of each rank, e.g. a,b. Run the same command on every host; the first serves.",
        metavar="HOSTS",
        fills=(EngineOptions, "hosts"),
        modes=SERVING,
    ),
    Option(
        "--rank",
        Group.ENGINE,
        "This host's rank among --hosts, from 0; by default found by its address.",
        click.IntRange(0),
        metavar="N",
        modes=SERVING,
        needs=("--hosts", "which names the places"),
    ),
    Option(
        "--drafts",
        Group.ENGINE,
        "Draft tokens a round at most, 0 for none; by default the engine chooses.",
        click.IntRange(0, MOST_DRAFTS),
        fills=(EngineOptions, "drafts"),
    ),
    Option(
        "--fixed-drafts",
        Group.ENGINE,
        "Verify as many drafts as --drafts says in every round, whatever they bring, to measure.",
        bool,
        fills=(EngineOptions, "fixed_drafts"),
        needs=("--drafts", "which says how many"),
    ),
    Option(
        "--profile",
        Group.ENGINE,
        "Write a trace of every step to this file (Chrome's format), and the GPU's share of time.",
        click.Path(dir_okay=False),
        metavar="FILE",
        fills=(EngineOptions, "profile"),
    ),
    Option(
        "--no-graphs",
        Group.ENGINE,
        "Launch without CUDA graphs, to compare (slower).",
        bool,
        fills=(EngineOptions, "graphs"),
        turn=operator.not_,
    ),
    Option(
        "--policy",
        Group.ENGINE,
        "Chunked prefill during decode: short inter-token latency (ITL), or throughput.",
        click.Choice([pace.value for pace in Pace]),
        fills=(PrefillPolicy, "pace"),
        turn=Pace,
        modes=SERVING,
    ),
    Option(
        "--itl-ms",
        Group.ENGINE,
        "Milliseconds of a step in which others decode, at most; by default as --policy says.",
        float,
        metavar="T",
        fills=(PrefillPolicy, "itl_ms"),
        modes=SERVING,
    ),
    Option(
        "--cache-gib",
        Group.ENGINE,
        "GiB of the prefix cache, pages and states; by default from the memory that is free.",
        float,
        metavar="G",
        modes=MANY,
    ),
    Option(
        "--no-cache",
        Group.ENGINE,
        "Turn the prefix cache off.",
        bool,
        modes=MANY,
    ),
    Option(
        "--host-gib",
        Group.ENGINE,
        "GiB that stay with the host where a GPU shares its memory (a DGX Spark); by default 10.",
        click.FloatRange(0, MOST_GIB),
        metavar="G",
        fills=(EngineOptions, "host_bytes"),
        turn=lambda gib: None if gib is None else int(gib * GIB),
    ),
)
SERVER = (
    Option("--host", Group.SERVER, "The address to listen on.", fills=(ServerOptions, "host")),
    Option(
        "--port",
        Group.SERVER,
        "The port to listen on; 0 takes a free one.",
        click.IntRange(0, 65535),
        fills=(ServerOptions, "port"),
    ),
    Option(
        "--served-model-name",
        Group.SERVER,
        "What clients call the model. May be given several times.",
        many=True,
        metavar="NAME",
        fills=(ServerOptions, "names"),
        turn=tuple,
    ),
    Option(
        "--max-queue",
        Group.SERVER,
        "Requests that may wait in the queue.",
        click.IntRange(0),
        fills=(ServerOptions, "max_queue"),
    ),
    Option(
        "--max-connections",
        Group.SERVER,
        "Open connections at a time.",
        click.IntRange(1),
        fills=(ServerOptions, "max_connections"),
    ),
    Option(
        "--read-timeout",
        Group.SERVER,
        "Seconds for a request's headers to arrive, and again for its body.",
        _ABOVE_0,
        fills=(ServerOptions, "read_timeout_s"),
    ),
    Option(
        "--allow-priority",
        Group.SERVER,
        "Let requests set their `priority`.",
        bool,
        fills=(ServerOptions, "allow_priority"),
    ),
    Option(
        "--request-timeout",
        Group.SERVER,
        "Seconds that one request may take.",
        _ABOVE_0,
        fills=(ServerOptions, "timeout_s"),
    ),
    Option(
        "--drain-timeout",
        Group.SERVER,
        "Seconds for running requests to finish after SIGTERM.",
        click.FloatRange(0),
        fills=(ServerOptions, "drain_timeout_s"),
    ),
    Option(
        "--no-page",
        Group.SERVER,
        "Serve no page at /.",
        bool,
        fills=(ServerOptions, "page"),
        turn=operator.not_,
    ),
    Option(
        "--watchdog-s",
        Group.SERVER,
        "Seconds without a step that end a hung engine; by default 10 (60 on a CPU), 0: never.",
        click.FloatRange(0),
        metavar="T",
        fills=(ServerOptions, "watchdog_s"),
    ),
    Option(
        "--restarts",
        Group.SERVER,
        "How often within ten minutes a dead engine process is restarted.",
        click.IntRange(0),
        metavar="N",
        fills=(ServerOptions, "restarts"),
    ),
    Option(
        "--restart-wait",
        Group.SERVER,
        "Seconds that a request may wait for an engine that restarts.",
        click.FloatRange(0),
        metavar="T",
        fills=(ServerOptions, "restart_wait_s"),
    ),
    Option(
        "--dumps",
        Group.SERVER,
        "The folder for dumps of a hung or dead engine; by default the system's temporary folder.",
        click.Path(file_okay=False),
        metavar="FOLDER",
        fills=(ServerOptions, "dumps"),
    ),
)


def _origins(given: Sequence[str]) -> tuple[str, ...]:
    """Raises OptionError for a value that is not an origin of a browser."""
    for origin in given:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise OptionError(
                f"--cors-origin {origin}: a browser's origin is like https://name or "
                "http://name:8080, without a path; or *, for all"
            )
    return tuple(given)


SECURITY = (
    Option(
        "--api-key",
        Group.SECURITY,
        "The API key that clients must send; by SPARK_API_KEY other users do not see it.",
        envvar="SPARK_API_KEY",
        metavar="KEY",
        fills=(ServerOptions, "api_key"),
        secret=True,
    ),
    *KEYS,
    Option(
        "--cors-origin",
        Group.SECURITY,
        "Let pages of this origin use the server from a browser; * for all. May be given "
        "several times.",
        many=True,
        metavar="ORIGIN",
        fills=(ServerOptions, "cors_origins"),
        turn=_origins,
    ),
    Option(
        "--allowed-hosts",
        Group.SECURITY,
        "A name by which clients may call the server, e.g. spark.example or *.example; * for any. "
        "May be given several times.",
        many=True,
        metavar="NAME",
        fills=(ServerOptions, "allowed_hosts"),
        turn=allowed_hosts,
    ),
    Option(
        "--tls-cert",
        Group.SECURITY,
        "Serve HTTPS with this certificate (PEM, with its chain).",
        click.Path(dir_okay=False),
        metavar="FILE",
        fills=(ServerOptions, "tls_cert"),
    ),
    Option(
        "--tls-key",
        Group.SECURITY,
        "The certificate's key (PEM, without a password).",
        click.Path(dir_okay=False),
        metavar="FILE",
        fills=(ServerOptions, "tls_key"),
    ),
)
OPTIONS = (*TASK, *ANSWER, *CHAT, *ENGINE, *SERVER, *SECURITY, *LOGGING)
OF_FILE = (FOLDER, *OPTIONS)


def server_options(values: Mapping[str, Any]) -> ServerOptions:
    """How to serve. Raises OptionError for values that contradict each other."""
    return fill(
        ServerOptions, OPTIONS, values, engine=engine_options(values), chat=chat_options(values)
    )


def chat_options(values: Mapping[str, Any]) -> ChatOptions:
    """How to read conversations."""
    return fill(ChatOptions, OPTIONS, values)


def engine_options(values: Mapping[str, Any]) -> EngineOptions:
    """How to run the engine. Raises OptionError as well."""
    policy = fill(PrefillPolicy, OPTIONS, values)
    cache = _cache_bytes(values["cache_gib"], values["no_cache"])
    return fill(EngineOptions, OPTIONS, values, policy=policy, cache_bytes=cache)


def body(values: Mapping[str, Any]) -> Body:
    """One answer's options as fields of a request to the server."""
    return Body(**settings(values))


def settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request that were given, and their values."""
    made = {}
    for row in OPTIONS:
        if row.fills is not None and row.fills[0] is Body and row.said(values[row.name]):
            value = values[row.name]
            made[row.fills[1]] = value if row.turn is None else row.turn(value)
    return made


def _cache_bytes(gib: float | None, none: bool) -> int | None:
    if gib is None:
        return 0 if none else None
    if none:
        raise OptionError("--cache-gib and --no-cache contradict each other: give one of them")
    if not 0 <= gib <= MOST_GIB:
        raise OptionError(
            f"--cache-gib is {gib:g}; give GiB from 0 (no cache) to {MOST_GIB}, e.g. 8"
        )
    return int(gib * GIB)
