"""Request bodies: read, decompressed, limited in size each and all together.

Knows HTTP's encodings and memory; knows no endpoint.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import AsyncIterator, Callable

from starlette.requests import Request

from spark_engine.runtime.server.api.fields import BadField
from spark_engine.runtime.server.client import Busy
from spark_engine.runtime.server.http_errors import TooLarge, UnknownEncoding

MAX_BODY = 32 << 20  # bytes
SMALL_BODY = 256 << 10  # bytes of each body that are always taken
LARGE_BODIES = 4 * MAX_BODY  # bytes beyond those that all may hold; one of the most allowed always


class Body:
    """A body that came whole, in `data`; it counts until it is dropped."""

    def __init__(self, bodies: Bodies) -> None:
        self.data = b""
        self._bodies = bodies
        self._large = 0

    @property
    def large(self) -> bool:
        """Does it count?"""
        return self._large > 0

    def grow(self, size: int) -> None:
        """So many bytes of it are there. Raises Busy where all together are too many."""
        more = max(0, size - SMALL_BODY) - self._large
        self._large, self._bodies.large = self._large + more, self._bodies.large + more
        if more and self._bodies.large > max(LARGE_BODIES, self._bodies.most):
            raise Busy("too many long prompts are being read; retry")

    def drop(self) -> None:
        """It is needed no more. May be called twice."""
        self._bodies.large -= self._large
        self._large, self.data = 0, b""


class Bodies:
    """Reads bodies of up to `most` bytes. Large ones share what memory there is for them; small
    ones always fit."""

    def __init__(self, most: int | None = None) -> None:
        self.most = most or MAX_BODY
        self.large = 0  # bytes held now beyond the first SMALL_BODY of each body

    async def take(self, request: Request) -> Body:
        """The body, unpacked; whoever has it drops it. Raises BadField, TooLarge,
        UnknownEncoding, Busy, and starlette's ClientDisconnect."""
        too_large = TooLarge(f"the body is over {self.most} bytes; send a shorter prompt")
        unpack = _unpacker(request.headers.get("content-encoding", ""))
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and (len(declared) > 12 or int(declared) > self.most):
            raise too_large
        parts, size, body = [], 0, Body(self)
        try:
            async for sent in request.stream():
                part = unpack(sent, self.most + 1 - size)
                parts.append(part)
                size += len(part)
                if size > self.most:
                    raise too_large
                body.grow(size)
            body.data = b"".join(parts)
        except BaseException:
            body.drop()
            raise
        return body

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The body, which counts until the block is left. Raises what `take` does."""
        body = await self.take(request)
        try:
            yield body.data
        finally:
            body.drop()


def _unpacker(encoding: str) -> Callable[[bytes, int], bytes]:
    """What makes a body's next bytes, at most so many, of those that came. Raises UnknownEncoding,
    and its result BadField."""
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return lambda sent, _: sent
    if name not in ("gzip", "x-gzip", "deflate"):
        words = f"the body's content-encoding is {encoding[:80]!r}; send it plain, or by gzip"
        raise UnknownEncoding(words)
    machine = zlib.decompressobj(zlib.MAX_WBITS | 32)  # gzip's head or zlib's

    def unpack(sent: bytes, most: int) -> bytes:
        try:
            return machine.decompress(sent, max(1, most))
        except zlib.error as error:
            raise BadField(f"the body is not valid {name}: {error}") from None

    return unpack
