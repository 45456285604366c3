"""An engine process that is started before its orders are known, and imports its modules meanwhile.

Both ends of that: the command line, which starts it first, and the process. Knows pipes and no
option; imports nothing of the package.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence

# -P: `python -m` would search the current folder first, and a clone's root has a `spark_engine`
# without the other packages
WORKER = (sys.executable, "-P", "-m", "spark_engine.runtime.server.engine_client.worker")


def spawn(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Starts a process that ends when the pipe to its standard input closes, with this one."""
    pipe = subprocess.PIPE
    return subprocess.Popen(command, bufsize=0, stdin=pipe, start_new_session=True)


class EarlyProcess:
    """One engine process without orders: a line of its standard input, once."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = spawn(WORKER)

    def take(self, arguments: Sequence[str]) -> subprocess.Popen[bytes] | None:
        """The process, to which the arguments and this environment are sent; None where it has
        ended, was closed or taken."""
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return None
        try:
            process.stdin.write(json.dumps([*arguments, dict(os.environ)]).encode() + b"\n")
        except OSError:
            process.wait()
            return None
        return process

    def close(self) -> None:
        """Ends it if it was not taken."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def read_orders() -> list[str]:
    """Waits for the arguments, in the early process, and takes over the environment. Exits where
    the parent ends without any."""
    data = b""
    while b"\n" not in data:
        if not (more := os.read(0, 1 << 16)):
            sys.exit()
        data += more
    *given, environment = json.loads(data.partition(b"\n")[0])
    os.environ.clear()
    os.environ.update(environment)
    arguments: list[str] = given
    return arguments
