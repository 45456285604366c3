"""uvicorn's connections with limits that it lacks: their number, how long a request may take to
arrive, how much is parsed at a time, and which connection is closed for a new one.

Knows sockets, HTTP's states and descriptors. Knows no endpoints.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import socket
import sys
import termios
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from spark_engine.runtime.server.api.answers import Json, error
from spark_engine.runtime.server.http.framing import PIECE, Parser

WRITE_S = 30.0  # an answer is aborted when its client takes no byte for this long
RETRIED = (408, 503)  # refusals after which the same request may be sent again
TURN_S = 0.005  # for parsing all connections, before the event loop does other work
WAITING = (h11.IDLE, h11.SEND_BODY)  # the client's turn: it must send a request, or the rest of one
log = logging.getLogger(__name__)


class Connections:
    """All connections of one server: at most `most`, and none may take longer than `read_s`
    seconds over the head of a request, nor over its body, nor leave an answer untouched for
    `write_s` once no more of it can be buffered.

    At the limit a new connection replaces the one that has been silent for longest and must send
    a request: first among those without an answer so far. A connection that is being answered is
    never closed. As many more may be in their TLS handshake; then a new one replaces the oldest.
    `refused` is called with the status of those that are refused before their request was complete.
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
        self._unparsed: deque[Connection] = deque()  # those with bytes that wait to be parsed
        self.in_handshake: dict[int, socket.socket] = {}  # by descriptor, the oldest first

    def shake(self, accepted: socket.socket) -> None:
        """A connection was accepted, and its TLS handshake begins."""
        self.in_handshake.pop(accepted.fileno(), None)  # of a connection that has ended
        if len(self.in_handshake) >= self.most:
            with suppress(OSError):  # it may have ended
                self.in_handshake.pop(next(iter(self.in_handshake))).shutdown(socket.SHUT_RDWR)
        self.in_handshake[accepted.fileno()] = accepted

    def parse_later(self, connection: Connection) -> None:
        """Parses the bytes of this connection, a piece at a time in turn with all others."""
        if not self._unparsed:
            connection.loop.call_soon(self._parse)
        self._unparsed.append(connection)

    def _parse(self) -> None:
        end = time.perf_counter() + TURN_S
        while self._unparsed:
            connection = self._unparsed.popleft()
            if connection.parse():
                self._unparsed.append(connection)
            if self._unparsed and time.perf_counter() > end:
                self._unparsed[0].loop.call_soon(self._parse)
                return

    def enter(self, connection: Connection) -> bool:
        """True if another connection fits, after closing one if needed."""
        if len(self.inside) >= self.most:
            if not self.waiting:
                return False
            unanswered = (c for c in self.waiting if not c.answered)
            next(unanswered, next(iter(self.waiting))).leave()
        self.inside.add(connection)
        self.wait(connection)
        return True

    def wait(self, connection: Connection) -> None:
        """The connection received bytes just now, and its client must send more."""
        self.waiting.pop(connection, None)
        self.waiting[connection] = None

    def answer(self, connection: Connection) -> None:
        """The connection's request is complete."""
        self.waiting.pop(connection, None)

    def leave(self, connection: Connection) -> None:
        self.inside.discard(connection)
        self.waiting.pop(connection, None)


class _Flow(FlowControl):
    """uvicorn's flow control; bytes that were received already are parsed first."""

    def __init__(self, transport: asyncio.Transport, resumed: Callable[[], None]) -> None:
        super().__init__(transport)
        self._resumed = resumed

    def resume_reading(self) -> None:
        super().resume_reading()
        self._resumed()


class Connection(H11Protocol):
    """One connection. `connections` is the server's; the rest is what uvicorn passes.

    At most PIECE bytes are parsed at once; further received bytes wait for their turn, and nothing
    is read until then.
    """

    def __init__(self, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self.conn = self._parser = Parser()
        self._connections = connections
        self._unparsed = bytearray()
        self._in_turn = False  # it is among those that are parsed in turn
        self._state: Any = None  # the client's state, of h11
        self.answered = False  # at least once
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._connections.in_handshake.pop(transport.get_extra_info("socket").fileno(), None)
        self.flow = _Flow(transport, self._resume_reading)
        if self._connections.enter(self):
            self._set_timer()
        else:
            words = f"all {self._connections.most} connections are in use; retry"
            self._refuse(503, error(words, "service_unavailable", code="too_many_connections"))

    def data_received(self, data: bytes) -> None:
        self._unparsed += data
        if self._in_turn or self.flow.read_paused:
            self.transport.pause_reading()
        elif self.parse():
            self._connections.parse_later(self)

    def parse(self) -> bool:
        """Parses the next piece. Returns whether another may be parsed now: then it is in turn."""
        self._in_turn = False
        if self._unparsed and not self.transport.is_closing() and not self.flow.read_paused:
            piece = bytes(self._unparsed[:PIECE])
            del self._unparsed[:PIECE]
            super().data_received(piece)
            self._set_timer()
        if self.transport.is_closing():
            self._unparsed.clear()
        if self.flow.read_paused:  # until the answer is sent, or the body is read
            return False
        self._in_turn = bool(self._unparsed)
        if self._in_turn:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()
        return self._in_turn

    def send_400_response(self, msg: str) -> None:
        """The bytes are not HTTP, or a refused form of it: sends the reason, and closes."""
        problem = self._parser.problem
        status = 431 if problem is not None and problem.error_status_hint == 431 else 400
        words = msg if problem is None else str(problem)
        self._refuse(status, error(words, "invalid_request_error", code="invalid_http"))

    def _resume_reading(self) -> None:
        """uvicorn can take more: parses bytes that were received already."""
        if self._unparsed:
            self.transport.pause_reading()
            if not self._in_turn:
                self._in_turn = True
                self._connections.parse_later(self)

    def on_response_complete(self) -> None:
        """An answer is sent: the next request may follow; uvicorn has the timeout for it."""
        super().on_response_complete()
        self.answered = True
        if self in self._connections.inside and self.conn.their_state in WAITING:
            self._connections.wait(self)
            if self.conn.their_state is h11.SEND_BODY:  # it was received with the last one
                self._set_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._trust_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unparsed.clear()
        self._forget()
        super().connection_lost(exc)

    def _watch_reader(self) -> None:
        waits = self._untaken()
        self._unread = self.loop.call_later(self._connections.write_s, self._on_unread, waits)

    def _untaken(self) -> int:
        """Bytes of answers, here and in the kernel, that the client has not acknowledged."""
        size = bytearray(4)
        fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, size)
        return self.transport.get_write_buffer_size() + int.from_bytes(size, sys.byteorder)

    def _trust_reader(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _on_unread(self, before: int) -> None:
        """`before`: the bytes that waited at the last check. Nothing is written in between."""
        if self._untaken() < before:
            self._watch_reader()
            return
        log.warning("a client has read nothing of its answer for %g s", self._connections.write_s)
        self.leave()

    def leave(self) -> None:
        self._forget()
        self.transport.abort()

    def _set_timer(self) -> None:
        """Starts the timeout of the client's turn, and stops it at the end of the turn."""
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
            self.leave()  # no request was started: an answer would be read as that of the next one
            return
        part = "head" if self.conn.their_state is h11.IDLE else "body"
        words = f"the request's {part} did not come within {self._connections.read_s:g} s"
        self._refuse(408, error(words, "invalid_request_error", code="request_timeout"))

    def _refuse(self, status: int, answer: Json) -> None:
        """Closes, with an answer if none was started."""
        self._unparsed.clear()
        self._forget()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        self._connections.refused(status)
        body = msgspec.json.encode(answer)
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        )
        retry = "retry-after: 1\r\n" if status in RETRIED else ""
        end = f"content-length: {len(body)}\r\n{retry}connection: close\r\n\r\n"
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
