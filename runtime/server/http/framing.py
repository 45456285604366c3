"""Parsing of HTTP/1.1: h11, with bounds on the cost of one event. Refuses requests that two parsers
may read differently.

Knows bytes and h11; knows no sockets and no endpoints.
"""

from typing import Any

import h11

PIECE = 4 << 10  # bytes that are passed to h11 at a time: at most some hundred events
MOST_HEAD = 16 << 10  # bytes of a request's line and headers, within one PIECE
MOST_HEADERS = 256
VERSIONS = (b"1.0", b"1.1")
FREE_CHUNKS = 16 << 10  # chunks of any size in a body; above, the mean is checked
MEAN_CHUNK = 64  # bytes


class Parser(h11.Connection):
    """A server's side of one connection. `problem`: why the client's bytes were refused."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size=MOST_HEAD)
        self.problem: h11.RemoteProtocolError | None = None
        self._chunks = self._size = 0  # of this body

    def next_event(self) -> Any:
        """h11's. Raises RemoteProtocolError."""
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                self._chunks = self._size = 0
                _check(event)
            elif isinstance(event, h11.Data):
                self._count(event)
        except h11.RemoteProtocolError as problem:
            self.problem = problem
            raise
        return event

    def _count(self, event: h11.Data) -> None:
        self._chunks += event.chunk_end
        self._size += len(event.data)
        if self._chunks > FREE_CHUNKS and self._size < self._chunks * MEAN_CHUNK:
            words = f"the body's first {self._chunks} chunks hold {self._size} bytes; send chunks"
            raise h11.RemoteProtocolError(f"{words} of at least {MEAN_CHUNK} bytes on average")


def _check(request: h11.Request) -> None:
    """Raises RemoteProtocolError for a request that another parser may read differently, or that
    has too many headers."""
    if request.http_version not in VERSIONS:
        shown = request.http_version.decode("latin-1")
        raise h11.RemoteProtocolError(f"use HTTP/1.1, not HTTP/{shown}")
    if not request.target.startswith(b"/"):  # behind a front it could address another host
        shown = request.target[:80].decode("latin-1")
        raise h11.RemoteProtocolError(f"the request's target must begin with /, not {shown!r}")
    names = {name for name, _ in request.headers}
    if b"transfer-encoding" in names:
        if b"content-length" in names:  # RFC 9112, 6.3: request smuggling
            words = "a request has a content-length or a transfer-encoding, not both"
            raise h11.RemoteProtocolError(words)
        if request.http_version < b"1.1":
            words = "a request of HTTP/1.0 has no transfer-encoding; send a content-length"
            raise h11.RemoteProtocolError(words)
    if len(request.headers) > MOST_HEADERS:
        words = f"the request has {len(request.headers)} headers; at most {MOST_HEADERS} are read"
        raise h11.RemoteProtocolError(words, error_status_hint=431)
