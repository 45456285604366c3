"""Ports that a test names before a server listens there: no other process gets one meanwhile."""

import socket

_HELD: list[socket.socket] = []  # until this process ends; none of them listens


def free_port() -> int:
    """A port of 127.0.0.1. A server that binds it with SO_REUSEADDR may listen on it; the system
    gives it to no other process that asks for any port, or that connects from one."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    _HELD.append(held)
    return int(held.getsockname()[1])
