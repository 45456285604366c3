"""The options of `spark-run`, one row each: the table makes the command line, its help, the
configuration file, and the options of the engine and the server.

A new option is a row here and the field that it fills, which has the option's default.
"""

import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import click

from spark_engine.device.choice import HELP
from spark_engine.errors import OptionError
from spark_engine.interface import MOST_DRAFTS
from spark_engine.runtime.cli.options.answer_options import ANSWER, CHAT
from spark_engine.runtime.cli.options.operation_options import ABOVE_0, BOUNDS, KEYS, LOGGING
from spark_engine.runtime.cli.options.option import (
    APIS,
    DIRECTORY,
    FILE,
    MANY,
    SERVING,
    Finite,
    Group,
    Option,
    fill,
    table,
)
from spark_engine.runtime.engine.options import EngineOptions
from spark_engine.runtime.engine.policy.pacing import Pace, PrefillPolicy
from spark_engine.runtime.server.api.common import Body
from spark_engine.runtime.server.http.host_names import allowed_hosts
from spark_engine.runtime.server.process.options import ServerOptions
from spark_engine.runtime.server.prompts.chat_options import ChatOptions

GIB, MOST_GIB = 1 << 30, 1 << 20
_ORIGIN = re.compile(r"https?://[^/\s:]+(:\d+)?|https?://\[[0-9a-fA-F:]+\](:\d+)?")
_task, _engine = table(Group.TASK), table(Group.ENGINE, EngineOptions)
_pace, _measure = table(Group.ENGINE, PrefillPolicy, APIS), table(Group.MEASURING, EngineOptions)
_server, _key = table(Group.SERVER, ServerOptions), table(Group.SECURITY, ServerOptions)
_service = table(Group.SERVER, ServerOptions, APIS)
# The argument of the command line, and a key of the configuration file.
FOLDER = _task(
    "--engine",
    "The engine folder; the embedded model by default. --serve takes several: a list.",
    metavar="FOLDER",
    listed=True,
)
TASK = (
    _task("--prompt", "Continue this text; - reads standard input."),
    _task("--prompt-ids", "Continue these token ids, e.g. 1,2,3."),
    _task("--chat", "Answer this message; - reads standard input."),
    _task("--serve", "Serve the OpenAI and Anthropic APIs, and a page, over HTTP.", bool),
    _task(
        "--batch",
        "Answer the requests in this file of OpenAI's batch lines; run it again to continue.",
        FILE,
    ),
    _task(
        "--out",
        "The file that the answers are appended to.",
        FILE,
        needs=("--batch", "which answers"),
    ),
)
ENGINE = (
    Option("--device", Group.ENGINE, HELP, click.IntRange(0), metavar="N"),
    _engine(
        "--tp",
        "Ranks that the engine must have, each on a GPU; by default as many as it was built for.",
        click.IntRange(1),
        metavar="N",
    ),
    _engine(
        "--hosts",
        "Host of each rank, e.g. a,b. Run the same command on every host; the first serves.",
        metavar="HOSTS",
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
    _engine(
        "--drafts",
        "Draft tokens a round at most, 0 for none; by default the engine chooses.",
        click.IntRange(0, MOST_DRAFTS),
    ),
    _pace(
        "--policy",
        "Prefill during decode: latency keeps the time between tokens short, throughput none.",
        click.Choice([pace.value for pace in Pace]),
        field="pace",
        turn=Pace,
    ),
    _pace(
        "--itl-ms",
        "Most milliseconds of a step that decodes and prefills; by default --policy decides.",
        float,
        metavar="T",
    ),
    Option(
        "--cache-gib",
        Group.ENGINE,
        "GiB of the prefix cache, pages and states, 0 for none; by default from the free memory.",
        float,
        metavar="G",
        modes=MANY,
    ),
    _engine(
        "--cache-dir",
        "Keep the prefix cache in this folder, for the next start; one server at a time.",
        DIRECTORY,
        modes=SERVING,
    ),
    _engine(
        "--cache-dir-gib",
        "Most GiB of files in --cache-dir; by default 32.",
        click.FloatRange(0, MOST_GIB, min_open=True),
        field="cache_dir_bytes",
        metavar="G",
        turn=lambda gib: None if gib is None else int(gib * GIB),
        modes=SERVING,
        needs=("--cache-dir", "which says where"),
    ),
    _engine(
        "--host-gib",
        "GiB left to the host if the GPU shares its memory (a DGX Spark); by default 10.",
        Finite(0, MOST_GIB),
        field="host_bytes",
        metavar="G",
        turn=lambda gib: None if gib is None else int(gib * GIB),
    ),
)
MEASURING = (
    _measure(
        "--profile",
        "Write a trace of every step to this file (Chrome's format), and the GPU's share of time.",
        FILE,
    ),
    _measure(
        "--fixed-drafts",
        "Verify --drafts tokens in every round, even if few are kept.",
        bool,
        needs=("--drafts", "which says how many"),
    ),
    _measure(
        "--no-graphs", "Launch without CUDA graphs (slower).", bool, "graphs", turn=operator.not_
    ),
)
SERVER = (
    _server("--host", "The address to listen on."),
    _server("--port", "The port to listen on; 0 takes a free one.", click.IntRange(0, 65535)),
    _service(
        "--served-model-name",
        "What clients call the model. May be given several times.",
        field="names",
        many=True,
        metavar="NAME",
        turn=tuple,
    ),
    *BOUNDS,
    _server("--max-queue", "Requests that may wait in the queue.", click.IntRange(0)),
    _server("--max-connections", "Open connections at a time.", click.IntRange(1)),
    _server(
        "--read-timeout",
        "Seconds for a request's headers to arrive, and again for its body.",
        ABOVE_0,
        "read_timeout_s",
    ),
    _service("--allow-priority", "Let requests set their `priority`.", bool),
    _service("--request-timeout", "Seconds that one request may take.", ABOVE_0, "timeout_s"),
    _server(
        "--drain-timeout",
        "Seconds for running requests to finish after SIGTERM.",
        Finite(0),
        "drain_timeout_s",
    ),
    _server("--no-page", "Serve no page at /.", bool, "page", turn=operator.not_),
    _service(
        "--watchdog-s",
        "Seconds without a step that end a hung engine; by default 10 (60 on a CPU), 0: never.",
        Finite(0),
        metavar="T",
    ),
    _service(
        "--restarts",
        "How often within ten minutes a dead engine process is restarted.",
        click.IntRange(0),
        metavar="N",
    ),
    _service(
        "--restart-wait",
        "Seconds that a request may wait for an engine that restarts, or is loaded.",
        Finite(0),
        "restart_wait_s",
        metavar="T",
    ),
    _server(
        "--idle-unload",
        "Unload an engine after this many seconds without a request; the next one loads it again.",
        ABOVE_0,
        "idle_unload_s",
        metavar="T",
    ),
    _server(
        "--models-gib",
        "GiB that the loaded engines of several models may take; by default what is free.",
        Finite(0, MOST_GIB, min_open=True),
        "models_bytes",
        metavar="G",
        turn=lambda gib: None if gib is None else int(gib * GIB),
    ),
    _service(
        "--dumps",
        "The folder for dumps of a hung or dead engine; by default the system's temporary folder.",
        DIRECTORY,
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
    _key(
        "--api-key",
        "The API key that clients must send; SPARK_API_KEY hides it from other users.",
        envvar="SPARK_API_KEY",
        metavar="KEY",
        secret=True,
    ),
    *KEYS,
    _key(
        "--cors-origin",
        "Let pages of this origin use the server from a browser; * for all. May be given "
        "several times.",
        field="cors_origins",
        many=True,
        metavar="ORIGIN",
        turn=_origins,
    ),
    _key(
        "--allowed-hosts",
        "A name by which clients may call the server, e.g. spark.example or *.example; * for any. "
        "May be given several times.",
        many=True,
        metavar="NAME",
        turn=allowed_hosts,
    ),
    _key("--tls-cert", "Serve HTTPS with this certificate (PEM, with its chain).", FILE),
    _key("--tls-key", "The certificate's key (PEM, without a password).", FILE),
)
OPTIONS = (*TASK, *ANSWER, *CHAT, *ENGINE, *MEASURING, *SERVER, *SECURITY, *LOGGING)
OF_FILE = (FOLDER, *OPTIONS)


def server_options(values: Mapping[str, Any]) -> ServerOptions:
    """The server's options. Raises OptionError for values that contradict each other."""
    return fill(
        ServerOptions, OPTIONS, values, engine=engine_options(values), chat=chat_options(values)
    )


def chat_options(values: Mapping[str, Any]) -> ChatOptions:
    return fill(ChatOptions, OPTIONS, values)


def engine_options(values: Mapping[str, Any]) -> EngineOptions:
    """The engine's options. Raises OptionError for values that contradict each other."""
    policy = fill(PrefillPolicy, OPTIONS, values)
    cache = _cache_bytes(values["cache_gib"])
    return fill(EngineOptions, OPTIONS, values, policy=policy, cache_bytes=cache)


def body(values: Mapping[str, Any]) -> Body:
    return Body(**settings(values))


def settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request that were given, and their values."""
    made = {}
    for row in OPTIONS:
        if row.fills is not None and row.fills[0] is Body and row.is_given(values[row.name]):
            value = values[row.name]
            made[row.fills[1]] = value if row.turn is None else row.turn(value)
    return made


def _cache_bytes(gib: float | None) -> int | None:
    if gib is None:
        return None
    if not 0 <= gib <= MOST_GIB:
        raise OptionError(
            f"--cache-gib is {gib:g}; give GiB from 0 (no cache) to {MOST_GIB}, e.g. 8"
        )
    return int(gib * GIB)
