"""Request bodies: read, decompressed, limited in size each and all together.

Knows HTTP's encodings and memory; knows no endpoint.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import zstandard
from starlette.requests import Request

from spark_engine.runtime.server.api.fields import BadField
from spark_engine.runtime.server.engine_client.client import Busy
from spark_engine.runtime.server.prompts.limits import MAX_BODY
from spark_engine.runtime.server.replies.errors import TooLarge, UnknownEncoding

MOST_WINDOW = 8 << 20  # bytes of zstd's window; RFC 9659 allows clients no more
TURN = 1 << 20  # bytes that are decompressed in one turn of the event loop
SMALL_BODY = 256 << 10  # bytes of each body that are always accepted
PART = 64 << 10  # bytes; smaller parts of a body are joined
LARGE_BODIES = 4 * MAX_BODY  # bytes above SMALL_BODY of all bodies; a largest one always fits


_inflate = partial(zlib.decompressobj, zlib.MAX_WBITS | 32)  # gzip's header or zlib's


def _unzstd() -> Any:  # each stream has a decompressor: one has the state of one stream
    return zstandard.ZstdDecompressor(max_window_size=MOST_WINDOW).decompressobj()


# The decompressor of a content-encoding, its input bytes at a time, and its error. Such an input
# expands to about 4 MiB at most: gzip makes up to 1,032 bytes of one, zstd 128 KiB of four.
ENCODINGS: Mapping[str, tuple[Callable[[], Any], int, type[Exception]]] = {
    "gzip": (_inflate, 512, zlib.error),
    "x-gzip": (_inflate, 512, zlib.error),
    "deflate": (_inflate, 512, zlib.error),
    "zstd": (_unzstd, 128, zstandard.ZstdError),
}


class ReceivedBody:
    """A complete body, in `parts`; it counts until it is dropped.

    The event loop does not join the parts, which would take too long for a large one.
    """

    def __init__(self, bodies: Bodies) -> None:
        self.parts: list[bytes | bytearray] = []
        self._bodies = bodies
        self._large = 0

    @property
    def large(self) -> bool:
        return self._large > 0

    @property
    def size(self) -> int:
        """Bytes of it that are held."""
        return sum(map(len, self.parts))

    def add(self, part: bytes) -> None:
        if self.parts and len(self.parts[-1]) < PART:
            self.parts[-1] += part
        else:
            self.parts.append(bytearray(part))

    def grow(self, size: int) -> None:
        """`size` bytes of it were received. Raises Busy where all bodies together are too large."""
        more = max(0, size - SMALL_BODY) - self._large
        self._large, self._bodies.large = self._large + more, self._bodies.large + more
        if more and self._bodies.large > max(LARGE_BODIES, self._bodies.most):
            raise Busy("too many long prompts are being read; retry")

    def drop(self) -> None:
        """Releases it. May be called twice."""
        self._bodies.large -= self._large
        self._large, self.parts = 0, []


class Bodies:
    """Reads bodies of up to `most` bytes. Large ones share LARGE_BODIES bytes; small ones always
    fit."""

    def __init__(self, most: int | None = None) -> None:
        self.most = most or MAX_BODY
        self.large = 0  # bytes held now above the first SMALL_BODY of each body

    async def take(self, request: Request) -> ReceivedBody:
        """The decompressed body; the caller must drop it. Raises BadField, TooLarge,
        UnknownEncoding, Busy, and starlette's ClientDisconnect."""
        too_large = TooLarge(f"the body is over {self.most} bytes; send a shorter prompt")
        unpack = _reader(request.headers.get("content-encoding", ""))
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and (len(declared) > 12 or int(declared) > self.most):
            raise too_large
        size, body, turn = 0, ReceivedBody(self), TURN
        try:
            async for sent in request.stream():
                for part in (sent,) if unpack is None else unpack.parts(sent):
                    size += len(part)
                    if size > self.most:
                        raise too_large
                    body.grow(size)
                    body.add(part)
                    if size > turn:  # other tasks get a turn of the event loop
                        turn = size + TURN
                        await asyncio.sleep(0)
        except BaseException:
            body.drop()
            raise
        return body


class _Packed:
    """A body of one of the ENCODINGS, which may be several compressed streams."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._make, self._slice, self._error = ENCODINGS[name]
        self._machine = self._make()

    def parts(self, sent: bytes) -> Iterator[bytes]:
        """The body's next bytes, in parts of a few MiB at most; nothing is `sent` at its end.
        Raises BadField."""
        if not sent and not self._machine.eof:
            raise BadField(f"the body is not valid {self._name}: its end is missing")
        for at in range(0, len(sent), self._slice):
            yield from self._unpacked(sent[at : at + self._slice])

    def _unpacked(self, data: bytes) -> Iterator[bytes]:
        try:
            while data:
                if self._machine.eof:  # one stream has ended, and another starts
                    self._machine = self._make()
                yield self._machine.decompress(data)
                data = self._machine.unused_data
        except self._error as error:
            raise BadField(f"the body is not valid {self._name}: {error}") from None


def _reader(encoding: str) -> _Packed | None:
    """The decompressor of a body; None for a plain one. Raises UnknownEncoding."""
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return None
    if name not in ENCODINGS:
        words = f"the body's content-encoding is {encoding[:80]!r}; send it plain, by gzip or zstd"
        raise UnknownEncoding(words)
    return _Packed(name)
