"""The options of `spark-run` for those who run a server: who may use it, and what it writes.

Rows of the table in `runtime/options.py`.
"""

from __future__ import annotations

import click

from spark_engine.runtime.option import Group, Option
from spark_engine.runtime.server.logs import LogFormat, LogLevel
from spark_engine.runtime.server.server import ServerOptions

KEYS = (
    Option(
        "--api-keys",
        Group.SECURITY,
        "A file (TOML) with keys, their names and their limits; read again on SIGHUP.",
        click.Path(dir_okay=False),
        metavar="FILE",
        fills=(ServerOptions, "api_keys"),
    ),
    Option(
        "--metrics-by-key",
        Group.SECURITY,
        "Count tokens and limits in /metrics by the names of keys too, and ask for a key there.",
        bool,
        fills=(ServerOptions, "metrics_by_key"),
        needs=("--api-keys", "no key has a name"),
    ),
    Option(
        "--queue-timeout",
        Group.SECURITY,
        "Seconds that a request may wait until the engine begins with it.",
        click.FloatRange(0, min_open=True),
        metavar="T",
        fills=(ServerOptions, "queue_timeout_s"),
    ),
    Option(
        "--max-model-len",
        Group.SECURITY,
        "Tokens that a request may reach, prompt and answer; as the engine holds by default.",
        click.IntRange(2),
        metavar="N",
        fills=(ServerOptions, "max_model_len"),
    ),
    Option(
        "--max-body-mib",
        Group.SECURITY,
        "MiB that a request's body may hold.",
        click.IntRange(1, 1024),
        metavar="N",
        fills=(ServerOptions, "max_body_mib"),
    ),
)
LOGGING = (
    Option(
        "--access-log",
        Group.LOGGING,
        "Write a line for every request: whose it was, tokens and times.",
        bool,
        fills=(ServerOptions, "access_log"),
    ),
    Option(
        "--log-format",
        Group.LOGGING,
        "For people, or one JSON object a line.",
        click.Choice([form.value for form in LogFormat]),
        fills=(ServerOptions, "log_format"),
        turn=LogFormat,
    ),
    Option(
        "--log-level",
        Group.LOGGING,
        "What is written: this, and what is worse.",
        click.Choice([level.value for level in LogLevel]),
        fills=(ServerOptions, "log_level"),
        turn=LogLevel,
    ),
    Option(
        "--otlp-traces-endpoint",
        Group.LOGGING,
        "Send a span for every request to this OpenTelemetry collector (extra `otel`).",
        metavar="URL",
        fills=(ServerOptions, "traces"),
    ),
)
