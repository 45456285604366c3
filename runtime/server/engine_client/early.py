"""An engine process that is started before its orders are known, and imports its modules meanwhile.

Both ends of that: the command line, which starts it first, and the process, which opens the first
GPU in a thread while it imports. Knows pipes and no option; nothing of the package is imported
before that thread runs.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module

# -P: `python -m` would search the current folder first, and a clone's root has a `spark_engine`
# without the other packages
WORKER = (sys.executable, "-P", "-m", "spark_engine.runtime.server.engine_client.worker")
EARLY = (*WORKER[:-1], "spark_engine.runtime.server.engine_client.early")


def spawn(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Starts a process that ends when the pipe to its standard input closes, with this one."""
    pipe = subprocess.PIPE
    return subprocess.Popen(command, bufsize=0, stdin=pipe, start_new_session=True)


class EarlyProcess:
    """One engine process without orders: a line of its standard input, once."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = spawn(EARLY)

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


def _open_gpu(close: list[Callable[[], None]]) -> None:
    """Opens the driver and a context, which take 0.2 s and which the engine then finds; adds what
    closes the context."""
    with suppress(Exception):  # no GPU: the engine says why
        close.append(import_module("spark_engine.device.cuda_driver").hold_context())


def main() -> int:
    """`python -m spark_engine.runtime.server.engine_client.early`: then `worker.main`."""
    close: list[Callable[[], None]] = []
    opening = threading.Thread(target=_open_gpu, args=(close,))
    opening.start()
    # imported here: the thread runs
    from pathlib import Path

    from spark_engine.engine_file import read_manifest
    from spark_engine.runtime.engine.detect import needs_gpu
    from spark_engine.runtime.server.engine_client import worker

    with suppress(Exception):  # an engine on the CPU needs none of it
        import_module("spark_engine.runtime.executors.native")
    opening.join()
    orders = read_orders()
    with suppress(Exception):  # the worker refuses the folder
        if close and not needs_gpu(read_manifest(Path(orders[0])).target):
            close.pop()()
    return worker.main(orders)


if __name__ == "__main__":
    sys.exit(main())
