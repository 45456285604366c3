"""The options of `spark-run` for those who run a server: who may use it, and what it writes.

Rows of the table in `runtime/options.py`.
"""

from __future__ import annotations

import click

from spark_engine.runtime.option import Group, table
from spark_engine.runtime.server.logs import LogFormat, LogLevel
from spark_engine.runtime.server.server import ServerOptions

_key, _log = table(Group.SECURITY, ServerOptions), table(Group.LOGGING, ServerOptions)
KEYS = (
    _key(
        "--api-keys",
        "A file (TOML) with keys, their names and their limits; read again on SIGHUP.",
        click.Path(dir_okay=False),
        metavar="FILE",
    ),
    _key(
        "--metrics-by-key",
        "Count tokens and limits in /metrics by the names of keys too, and ask for a key there.",
        bool,
        needs=("--api-keys", "no key has a name"),
    ),
    _key(
        "--queue-timeout",
        "Seconds that a request may wait until the engine begins with it.",
        click.FloatRange(0, min_open=True),
        field="queue_timeout_s",
        metavar="T",
    ),
    _key(
        "--max-model-len",
        "Tokens that a request may reach, prompt and answer; as the engine holds by default.",
        click.IntRange(2),
        metavar="N",
    ),
    _key(
        "--max-body-mib",
        "MiB that a request's body may hold.",
        click.IntRange(1, 1024),
        metavar="N",
    ),
)
LOGGING = (
    _log("--access-log", "Write a line for every request: whose it was, tokens and times.", bool),
    _log(
        "--log-format",
        "For people, or one JSON object a line.",
        click.Choice([form.value for form in LogFormat]),
        turn=LogFormat,
    ),
    _log(
        "--log-level",
        "What is written: this, and what is worse.",
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
