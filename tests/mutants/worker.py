"""Runs pytest repeatedly in one tree, each time in a fork that has imported the large libraries.

`run.py` starts it in a copy of the tree with that copy's interpreter; it reads a JSON line for each
run and answers with one. It imports nothing of the project before the fork, so that every run sees
the current files.
"""

import contextlib
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

LIBRARIES = (
    *("numpy", "ml_dtypes", "onnx", "onnx.reference", "onnx_graphsurgeon", "onnxruntime"),
    *("safetensors.numpy", "tokenizers", "jinja2", "msgspec", "fastapi", "uvicorn", "httpx"),
    *("zmq.asyncio", "prometheus_client", "rich.console", "rich.table", "rich.progress", "click"),
    *("pytest", "_pytest.assertion.rewrite", "_pytest.tmpdir", "hypothesis", "openai"),
    *("polygraphy.comparator", "cuda.bindings.nvrtc"),
)


def serve() -> None:
    """Answers until its input ends."""
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        print(json.dumps(_run(**json.loads(line))), flush=True)


def _run(tests: list[str], timeout: float, log: str, first_only: bool) -> dict[str, Any]:
    """Exit code (None: it ran out of time), seconds, and outcome by test.

    With `first_only` the first failure ends it.
    """
    outcomes = Path(f"{log}.json")
    outcomes.unlink(missing_ok=True)
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        _child(tests, log, outcomes, first_only)
    code = _wait(child, start + timeout)
    with contextlib.suppress(ProcessLookupError):  # what the tests left running
        os.killpg(child, signal.SIGKILL)
    found = json.loads(outcomes.read_text()) if outcomes.exists() else {}
    return {"code": code, "seconds": time.monotonic() - start, "outcomes": found}


def _child(tests: list[str], log: str, outcomes: Path, first_only: bool) -> None:
    code = 99
    try:
        os.setsid()
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(file, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        pytest = importlib.import_module("pytest")
        plugin = _Outcomes()
        stop = ["-x"] if first_only else []
        options = ["-q", "-p", "no:cacheprovider", *stop]
        code = int(pytest.main([*options, *tests], plugins=[plugin]))
        outcomes.write_text(json.dumps(plugin.found))
        sys.stdout.flush()
    finally:
        os._exit(code)


def _wait(child: int, until: float) -> int | None:
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


class _Outcomes:
    """A pytest plugin: "passed", "failed" or "skipped" by node id."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.found[report.nodeid] = report.outcome


if __name__ == "__main__":
    serve()
