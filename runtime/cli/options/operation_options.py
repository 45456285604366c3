"""The options of `spark-run` for operators of a server: keys, bounds of requests, logs, traces.

Rows of the table in `runtime/cli/options/run_options.py`.
"""

import click

from spark_engine.runtime.cli.options.option import APIS, FILE, Finite, Group, table
from spark_engine.runtime.server.operation.logs import LogFormat, LogLevel
from spark_engine.runtime.server.process.options import ServerOptions

ABOVE_0 = Finite(0, min_open=True)
_key, _server, _log = (
    table(group, ServerOptions) for group in (Group.SECURITY, Group.SERVER, Group.LOGGING)
)
_service = table(Group.SERVER, ServerOptions, APIS)
KEYS = (
    _key("--api-keys", "A TOML file of API keys with names and limits; reloaded on SIGHUP.", FILE),
    _key(
        "--metrics-by-key",
        "Count tokens and limits in /metrics by key name too, and require a key there.",
        bool,
        needs=("--api-keys", "no key has a name"),
    ),
)
BOUNDS = (
    _server(
        "--queue-timeout",
        "Seconds that a request may wait in the queue.",
        ABOVE_0,
        "queue_timeout_s",
        metavar="T",
    ),
    _service(
        "--max-model-len",
        "Tokens of a prompt and its answer together; by default the context of the build.",
        click.IntRange(2),
        metavar="N",
    ),
    _service(
        "--max-body-mib", "MiB of a request's body at most.", click.IntRange(1, 1024), metavar="N"
    ),
)
LOGGING = (
    _log(
        "--access-log",
        "Write a line for every request (not for successful probes, scrapes and the page's files): "
        "its key, tokens and times.",
        bool,
    ),
    _log(
        "--access-log-all",
        "Write lines for probes, /metrics and the page's files too.",
        bool,
        needs=("--access-log", "which writes the lines"),
    ),
    _log(
        "--log-format",
        "Plain text, or one JSON object a line.",
        click.Choice([form.value for form in LogFormat]),
        turn=LogFormat,
    ),
    _log(
        "--log-level",
        "The lowest level that is logged.",
        click.Choice([level.value for level in LogLevel]),
        turn=LogLevel,
    ),
    _log(
        "--otlp-traces-endpoint",
        "Send a span for every request to this OpenTelemetry collector (extra `otel`).",
        field="traces",
        metavar="URL",
    ),
)
