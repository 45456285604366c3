"""Ports that a test names before a server listens there: no other process gets one meanwhile; and
`spark-run --serve` as a process there."""

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests import patient

_HELD: list[socket.socket] = []  # until this process ends; none of them listens


def free_port() -> int:
    """A port of 127.0.0.1. A server that binds it with SO_REUSEADDR may listen on it; the system
    gives it to no other process that asks for any port, or that connects from one."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    _HELD.append(held)
    return int(held.getsockname()[1])


@contextmanager
def served(*arguments: str, log: Path | None = None, start_s: float = 300) -> Iterator[str]:
    """The address of a server with these arguments; without any it serves the embedded model, which
    the first start builds. Its output goes to `log`, or is in the RuntimeError of one that does not
    start within `start_s` seconds."""
    port = free_port()
    run = [sys.executable, "-P", "-m", "spark_engine.runtime.cli.start", *arguments]
    with tempfile.TemporaryFile("w+") if log is None else log.open("w+") as output:
        command = [*run, "--serve", "--port", str(port)]
        process = subprocess.Popen(command, stdout=output, stderr=output)
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + start_s
        try:
            while not _is_ready(url):
                if process.poll() is not None or time.monotonic() > end:
                    output.seek(0)
                    raise RuntimeError(f"spark-run did not serve: {output.read()[-2000:]}")
                time.sleep(0.05)
            yield url
        finally:
            process.terminate()
            code = process.wait(60)
        assert code == 0, f"the server ended with {code}"


def _is_ready(url: str) -> bool:
    try:
        return patient.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False
