"""uvicorn's connections with limits that it lacks: their number, how long a request may take to
arrive, and which connection is closed for a new one.

Knows sockets, HTTP's states and descriptors. Knows no endpoints.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import resource
import sys
import termios
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from spark_engine.runtime.server.api.answers import Json, error

SPARE = 16  # descriptors for what is opened while serving, and for connections on their way in
MOST_DESCRIPTORS = 1 << 20  # some systems' hard limit is a thousand times this
WRITE_S = 30.0  # an answer of which no byte is taken for so long is cut off
WAITING = (h11.IDLE, h11.SEND_BODY)  # the client's turn: a request, or the rest of one, is to come
log = logging.getLogger(__name__)


class Connections:
    """All connections of one server: at most `most`, and none may take longer than `read_s`
    seconds over the head of a request, nor over its body, nor leave an answer untouched for
    `write_s` once no more of it can be buffered.

    Where there is no room for another, the one that has been silent for longest gives way, if
    its client owes us a request: one that was answered before only where there is no other. A
    connection whose request is being answered never does. `refused` is told the status of those
    that are sent away before their request was whole.
    """

    def __init__(
        self,
        most: int,
        read_s: float,
        write_s: float = WRITE_S,
        refused: Callable[[int], None] = lambda status: None,
    ) -> None:
        self.most = most
        self.refused = refused
        self.read_s = read_s
        self.write_s = write_s
        self.inside: set[Connection] = set()
        self.waiting: dict[Connection, None] = {}  # the longest silent first

    def enter(self, connection: Connection) -> bool:
        """Whether there is room, made or found."""
        if len(self.inside) >= self.most:
            if not self.waiting:
                return False
            strangers = (c for c in self.waiting if not c.answered)
            next(strangers, next(iter(self.waiting))).leave()
        self.inside.add(connection)
        self.wait(connection)
        return True

    def wait(self, connection: Connection) -> None:
        """The connection was heard just now, and its client is to go on."""
        self.waiting.pop(connection, None)
        self.waiting[connection] = None

    def answer(self, connection: Connection) -> None:
        """The connection's request is complete."""
        self.waiting.pop(connection, None)

    def leave(self, connection: Connection) -> None:
        """The connection is closed."""
        self.inside.discard(connection)
        self.waiting.pop(connection, None)


class Connection(H11Protocol):
    """One connection. `connections` is the server's; the rest is what uvicorn passes."""

    def __init__(self, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._connections = connections
        self._state: Any = None  # the client's, by h11
        self.answered = False  # once at least
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Comes in, or is sent away."""
        super().connection_made(transport)
        if self._connections.enter(self):
            self._set_timer()
        else:
            words = f"all {self._connections.most} connections are in use; retry"
            self._refuse(503, error(words, "service_unavailable", code="too_many_connections"))

    def data_received(self, data: bytes) -> None:
        """Bytes of a request."""
        super().data_received(data)
        self._set_timer()

    def on_response_complete(self) -> None:
        """An answer is out: the next request may come, for which uvicorn keeps the time."""
        super().on_response_complete()
        self.answered = True
        if self in self._connections.inside and self.conn.their_state in WAITING:
            self._connections.wait(self)
            if self.conn.their_state is h11.SEND_BODY:  # the next request came with the last one
                self._set_timer()

    def pause_writing(self) -> None:
        """The buffer is full: the answer waits for its client."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """There is room again."""
        super().resume_writing()
        self._trust_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is closed, by whomever."""
        self._forget()
        super().connection_lost(exc)

    def _watch_reader(self) -> None:
        waits = self._untaken()
        self._unread = self.loop.call_later(self._connections.write_s, self._on_unread, waits)

    def _untaken(self) -> int:
        """Bytes of answers, here and in the kernel, that the client's side has not acknowledged."""
        size = bytearray(4)
        fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, size)
        return self.transport.get_write_buffer_size() + int.from_bytes(size, sys.byteorder)

    def _trust_reader(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _on_unread(self, before: int) -> None:
        """`before`: bytes that waited a while ago. Nothing is written meanwhile."""
        if self._untaken() < before:
            self._watch_reader()
            return
        log.warning("a client has read nothing of its answer for %g s", self._connections.write_s)
        self.leave()

    def leave(self) -> None:
        """Makes room at once."""
        self._forget()
        self.transport.abort()

    def _set_timer(self) -> None:
        """Sets the clock where the client's part has begun, and stops it where that is done."""
        if self not in self._connections.inside:
            return
        state = self.conn.their_state
        if state in WAITING:
            self._connections.wait(self)
            if self._deadline is None or state is not self._state:
                self._stop()
                self._deadline = self.loop.call_later(self._connections.read_s, self._on_timeout)
        else:
            self._connections.answer(self)
            self._stop()
        self._state = state

    def _on_timeout(self) -> None:
        if self.answered and self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self.leave()  # nothing was begun: an answer would be taken for that of the next request
            return
        part = "head" if self.conn.their_state is h11.IDLE else "body"
        words = f"the request's {part} did not come within {self._connections.read_s:g} s"
        self._refuse(408, error(words, "invalid_request_error", code="request_timeout"))

    def _refuse(self, status: int, answer: Json) -> None:
        """Closes, with an answer where none has begun."""
        self._forget()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        self._connections.refused(status)
        body = msgspec.json.encode(answer)
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        )
        end = f"content-length: {len(body)}\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
        self.transport.write(f"{head}{end}".encode() + body)
        self.transport.close()

    def _stop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _forget(self) -> None:
        self._stop()
        self._trust_reader()
        self._connections.leave(self)


def raise_descriptor_limit() -> int:
    """Lets this process and its children open as many descriptors as they may; returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def room_for_connections(limit: int) -> int:
    """Connections for which there are descriptors, `limit` being the process's; at least one."""
    return max(1, limit - len(os.listdir("/proc/self/fd")) - SPARE)
