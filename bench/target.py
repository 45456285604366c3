"""The server that is measured: a running one, or one that is started for the bench.

Knows `spark-run --serve` and the endpoints that describe the model.
"""

import json
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

from spark_engine.bench.timings import Server
from spark_engine.errors import EngineError, OptionError

STOP_S = 60.0  # seconds: a server that writes a profile ends slowly
ASK_S = 10.0
NOT_OURS = "does not answer as an OpenAI server does"
QUEUE = "4096"  # requests that may wait: the server must refuse none
_SERVING = re.compile(r"serving .* on (http://\S+)")
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy, as the clients
Say = Callable[[str], None]


@contextmanager
def started(engine: Path, more: Sequence[str], say: Say) -> Iterator[str]:
    """Serves the engine folder while the `with` block runs, and ends the server also on SIGTERM;
    yields the URL.

    `more` are options of `spark-run`; `say` receives its output. Call it from the main thread.
    Raises EngineError.
    """
    run = [sys.executable, "-P", "-m", "spark_engine.runtime.cli.spark_run", str(engine)]
    command = [*run, "--serve", "--port", "0", "--max-queue", QUEUE, *more]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        url = _wait(process, say)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
        finally:  # also end the server on a second Ctrl-C
            process.kill()
            process.wait()
            signal.signal(signal.SIGTERM, before)


def _leave(number: int, _frame: object) -> None:
    sys.exit(128 + number)


def ask(url: str, model: str | None, api_key: str | None) -> Server:
    """The server at `url`. Raises OptionError."""
    rows = _get(f"{url}/v1/models", api_key).get("data") or []
    if not (isinstance(rows, list) and all(isinstance(r, dict) and "id" in r for r in rows)):
        raise OptionError(f"{url}/v1/models {NOT_OURS}")
    served = {str(row["id"]): row for row in rows}
    if not served:
        raise OptionError(f"{url} serves no model: start it with one")
    if model is not None and model not in served:
        raise OptionError(f"--model is {model!r}; {url} serves {', '.join(served)}")
    name = next(iter(served)) if model is None else model
    try:
        version = _get(f"{url}/version", api_key).get("version")
    except OptionError:  # not every server has this endpoint
        version = None
    most = served[name].get("max_model_len")
    most = most if type(most) is int else None
    return Server(url, name, api_key, most=most, version=version)


def _wait(process: subprocess.Popen[str], say: Say) -> str:
    """The URL, once the server is ready. `say` also receives later output."""
    lines = iter(process.stderr or ())
    last = ""
    for line in lines:
        last = line.rstrip()
        if found := _SERVING.search(line):
            threading.Thread(target=_pass_on, args=(lines, say), daemon=True).start()
            return found[1]
        say(last)
    code = process.wait()
    raise EngineError(f"the server ended with exit code {code} before it was ready: {last}")


def _pass_on(lines: Iterator[str], say: Say) -> None:
    for line in lines:
        say(line.rstrip())


def _get(url: str, api_key: str | None) -> dict[str, Any]:
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        asked = urllib.request.Request(url, headers=headers)
        with _OPENER.open(asked, timeout=ASK_S) as answer:
            row = json.loads(answer.read())
    except urllib.error.HTTPError as error:
        raise OptionError(f"{url} answers {error.code} ({error.reason})") from None
    except HTTPException as error:  # an invalid address, or no HTTP server
        words = " ".join(f"{type(error).__name__}: {error}".split())
        raise OptionError(f"{url} {NOT_OURS} ({words})") from None
    except (OSError, ValueError) as error:
        raise OptionError(f"{url} does not answer ({error}): is the server up?") from None
    if not isinstance(row, dict):
        raise OptionError(f"{url} {NOT_OURS}")
    return row
