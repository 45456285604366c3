"""One replica's server: `spark-run --serve`, started by the placement.

`python -m spark_engine.runtime.replicas.server_process ENGINE` reads the ServerOptions as JSON from
the first line of its standard input, since a key on the command line would be visible to other
users. It exits when its standard input closes, so that a server does not outlive its parent.
"""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from spark_engine.command import command
from spark_engine.errors import CapacityError
from spark_engine.runtime.server.operation.json_stderr import standard_error
from spark_engine.runtime.server.operation.logs import set_up
from spark_engine.runtime.server.process.options import ServerOptions
from spark_engine.runtime.server.process.server import run

LOOK_S = 0.1  # polling interval during the start
ANSWER_S = 3.0


class ServerProcess:
    """A server in a separate process. `stop` ends it."""

    def __init__(self, folder: str, options: ServerOptions) -> None:
        port = free_port(options.host)
        own = replace(options, port=port, tls_cert=None, tls_key=None)
        module = "spark_engine.runtime.replicas.server_process"
        words = [sys.executable, "-P", "-m", module, folder]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; `wait` raises the error
            self._process.stdin.write(msgspec.json.encode(own) + b"\n")
            self._process.stdin.flush()
        host = f"[{options.host}]" if ":" in options.host else options.host
        self.url = f"http://{host}:{port}"

    @property
    def ended(self) -> str:
        """The server's end in words; empty while it runs."""
        code = self._process.poll()
        return "" if code is None else f"the server ended with {code}; its log says why"

    def wait(self, limit_s: float) -> None:
        """Waits until it accepts requests. Raises CapacityError if it ends, or takes too long."""
        end = time.monotonic() + limit_s
        while self.health() != 200:
            if words := self.ended:
                raise CapacityError(words)
            if time.monotonic() > end:
                self.stop(0)
                raise CapacityError(f"the server does not answer after {limit_s:.0f} s")
            time.sleep(LOOK_S)

    def health(self) -> int:
        """The status of /health; 0 without an answer."""
        return self.get("/health")[0]

    def get(self, path: str) -> tuple[int, bytes]:
        """(status, body); 0 without an answer."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=ANSWER_S) as response:
                return int(response.status), response.read()
        except urllib.error.HTTPError as error:
            return error.code, b""
        except OSError:
            return 0, b""

    def stop(self, drain_s: float) -> None:
        """Ends it; requests get `drain_s` seconds. May be called twice."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(drain_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


def free_port(host: str) -> int:
    """A port without a listener."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as found:
        found.bind((host, 0))
        return int(found.getsockname()[1])


def _leave_with_the_parent() -> None:
    while os.read(0, 64):
        pass
    os._exit(0)  # the engine process exits by itself: it reads a pipe from this process


def main(arguments: Sequence[str] | None = None) -> None:
    (folder,) = sys.argv[1:] if arguments is None else arguments
    options = msgspec.json.decode(sys.stdin.buffer.readline(), type=ServerOptions)
    threading.Thread(target=_leave_with_the_parent, daemon=True).start()
    set_up(options.log_format, options.log_level)
    with standard_error(options.log_format), command("spark-run"):
        sys.exit(run(Path(folder), options))


if __name__ == "__main__":
    main()
