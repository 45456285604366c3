"""The server's address: claimed at the start, listened on after loading.

With SO_REUSEADDR, without which a server cannot restart for a minute, Linux lets two sockets bind
one port as long as neither listens. To refuse a second server at once, and not only after its
engine is loaded, the port is also claimed as a name in the abstract namespace of Unix sockets,
which is private to a network namespace as ports are, and is released with the process.
"""

import socket
import sys
from collections.abc import Callable

from spark_engine.errors import OptionError

CLAIM = "\0spark-engine listens on {} of {}"


class Listener(socket.socket):
    """A bound socket; its port is claimed until it is closed. Each new connection goes through
    `accepted`."""

    claim: socket.socket | None = None
    accepted: Callable[[socket.socket], object] | None = None

    def accept(self) -> tuple[socket.socket, object]:
        connection, address = super().accept()
        if self.accepted is not None:
            self.accepted(connection)
        return connection, address

    def close(self) -> None:
        if self.claim is not None:
            self.claim.close()
        super().close()


def bind(host: str, port: int) -> Listener:
    """A bound socket that does not listen yet, so that no client waits on a loading engine. Raises
    OptionError, with the port, if it is in use."""
    listener = Listener(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        if sys.platform == "linux":
            listener.claim = _claimed(*listener.getsockname()[:2])
    except OSError as error:
        listener.close()
        words = f"cannot serve on {host}:{port} ({error.strerror}); choose another --host or --port"
        raise OptionError(words) from None
    return listener


def _claimed(host: str, port: int) -> socket.socket:
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(CLAIM.format(port, host))
    except OSError:
        claim.close()
        raise
    return claim
