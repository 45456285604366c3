"""Ports that a test names before somebody listens there: nobody else is given one meanwhile."""

from __future__ import annotations

import socket

_HELD: list[socket.socket] = []  # until this process ends; none of them listens


def free_port() -> int:
    """Of 127.0.0.1. Whoever binds with SO_REUSEADDR, as servers do, may listen on it; whoever asks
    the system for some port, or connects from one, gets another."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    _HELD.append(held)
    return int(held.getsockname()[1])
