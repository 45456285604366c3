"""The server's log, as text or JSON, and the access log, a line for every request.

Knows the formats of lines. The rate limit is in `log_limit.py`.
"""

import enum
import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec

from spark_engine.runtime.server.operation.http_request import HttpRequest, current
from spark_engine.runtime.server.operation.log_limit import ACCESS

PLAIN = frozenset(
    "-_.~:/+%=,@[]()*&?!$"
)  # characters of a value without quotes, next to letters and digits
# Routes that probes, Prometheus and the page poll.
QUIET = frozenset(
    ("/health", "/ping", "/ready", "/load", "/metrics", "/page/live", "/page/{name:path}", "/")
)
FIELDS = "fields"  # of a record: the named values of its line


class LogFormat(enum.StrEnum):
    """For people, or one JSON object a line."""

    TEXT = "text"
    JSON = "json"


class LogLevel(enum.StrEnum):
    """The least severe level that is written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def set_up(form: LogFormat, level: LogLevel, stream: TextIO | None = None) -> None:
    """Replaces the handlers of the root logger; `stream` is standard error by default."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if form is LogFormat.JSON else TextFormatter())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    logging.captureWarnings(True)  # Python's warnings are records like others
    logging.getLogger(ACCESS).setLevel(logging.INFO)  # another option enables it


class TextFormatter(logging.Formatter):
    """`spark-run: ` and the message, with the current request's id."""

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, FIELDS, None)
        message = record.getMessage()
        request = current()
        if fields is not None:
            message += "".join(f" {name}={_quoted(value)}" for name, value in fields.items())
        elif request is not None:
            message += f" [request {request.id}]"
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        return f"spark-run: {message}"


class JsonFormatter(logging.Formatter):
    """`time` (UTC), `level`, `logger`, `message`, and the record's fields or the request's id."""

    def format(self, record: logging.LogRecord) -> str:
        row: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        request = current()
        if (fields := getattr(record, FIELDS, None)) is not None:
            row |= fields
        elif request is not None:
            row["id"] = request.id
        if record.exc_info:
            row["exception"] = self.formatException(record.exc_info)
        try:
            return msgspec.json.encode(row, enc_hook=str).decode()
        except UnicodeEncodeError:  # half a surrogate pair, as in a file's name that is not UTF-8
            return json.dumps(row, default=str)


class AccessLog:
    """One line a request, when it has ended. Without `all_` a successful probe, scrape or poll of
    the page has none."""

    def __init__(self, all_: bool = False) -> None:
        self._log = logging.getLogger(ACCESS)
        self._all = all_

    def __call__(self, request: HttpRequest) -> None:
        expected = request.status < 400 or request.status == 503  # the two answers to a probe
        if not self._all and request.handler in QUIET and expected:
            return
        self._log.info("access", extra={FIELDS: describe(request)})


def describe(request: HttpRequest) -> Mapping[str, str | int | float]:
    """The named values of a request: seconds, tokens; unknown ones are omitted."""
    row: dict[str, str | int | float | None] = {
        "id": request.id,
        "key": request.key or None,
        "client": request.client or None,
        "method": request.method,
        "path": request.path,
        "model": request.model or None,
        "status": request.status,
        "seconds": round(request.seconds, 4),
        "problem": request.problem or None,
    }
    if (use := request.use) is not None:
        row |= {
            "prompt": use.prompt,
            "cached": use.cached,
            "tokens": use.completion,
            "ends": ",".join(use.ends),
            "queued": None if use.queued is None else round(use.queued, 4),
            "first": None if use.first is None else round(use.first, 4),
        }
    return {name: value for name, value in row.items() if value is not None}


def _quoted(value: object) -> str:
    """A value without ambiguity: one with a space, quote or line break is quoted."""
    text = str(value)
    if text and all(c.isascii() and (c.isalnum() or c in PLAIN) for c in text):
        return text
    return ascii(text)
