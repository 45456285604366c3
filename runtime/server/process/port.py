"""The address that a server will listen on: taken at once, listened on later.

Linux lets two sockets have one port as long as neither listens, where both may reuse what a server
before them left (SO_REUSEADDR, without which a server cannot start again for a minute). So that a
second server is told at once, and not when its engine is loaded, the port is also a name in the
abstract namespace of Unix sockets, which a network namespace has as it has its ports, and which
goes with its process.
"""

from __future__ import annotations

import socket
import sys

from spark_engine.errors import OptionError

CLAIM = "\0spark-engine listens on {} of {}"


class Listener(socket.socket):
    """A bound socket; its port is claimed until it is closed."""

    claim: socket.socket | None = None

    def close(self) -> None:
        """The port with it."""
        if self.claim is not None:
            self.claim.close()
        super().close()


def bind(host: str, port: int) -> Listener:
    """A bound socket that does not listen yet, so that nobody waits on a loading engine. Raises
    OptionError, with the port, where it is another's."""
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
