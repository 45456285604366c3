"""HTTP to the replicas: a question asked, an answer as it comes.

Knows aiohttp, and no other file of the runtime does. What breaks on the way is `Lost`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence

import aiohttp

Headers = Sequence[tuple[str, str]]
CONNECT_S = 5.0
READ = 1 << 16  # bytes at a time
BROKEN = (aiohttp.ClientError, OSError, TimeoutError, EOFError)


class Lost(Exception):
    """A replica could not be reached, or broke its answer off."""


class Answer:
    """An answer whose head has come."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers: Headers = tuple(response.headers.items())

    @property
    def streams(self) -> bool:
        """Is it a stream of events?"""
        return bool(self._response.content_type == "text/event-stream")

    async def whole(self) -> bytes:
        """All of its body. Raises Lost."""
        try:
            return bytes(await self._response.read())
        except BROKEN as error:
            raise Lost(_words(error)) from None

    async def parts(self) -> AsyncIterator[bytes]:
        """Its body as it comes. Raises Lost."""
        try:
            while part := await self._response.content.readany():
                yield part
        except BROKEN as error:
            raise Lost(_words(error)) from None


class Upstream:
    """Connections to all replicas. Made within the event loop."""

    def __init__(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60, ttl_dns_cache=10)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            read_bufsize=READ,
        )

    @contextlib.asynccontextmanager
    async def ask(
        self, method: str, url: str, headers: Headers = (), body: bytes = b""
    ) -> AsyncIterator[Answer]:
        """The answer; leaving the block early ends it over there. Raises Lost."""
        try:
            asked = self._session.request(
                method, url, headers=list(headers), data=body or None, allow_redirects=False
            )
            response = await asked
        except BROKEN as error:
            raise Lost(_words(error)) from None
        try:
            yield Answer(response)
        finally:
            response.release() if response.content.at_eof() else response.close()

    async def get(
        self, url: str, limit_s: float, headers: Headers = ()
    ) -> tuple[int, bytes, Mapping[str, str]]:
        """(status, body, headers) of a small answer. Raises Lost, also after `limit_s` seconds."""
        timeout = aiohttp.ClientTimeout(total=limit_s)
        try:
            asked = self._session.get(
                url, headers=list(headers), timeout=timeout, allow_redirects=False
            )
            async with asked as response:
                return response.status, await response.read(), response.headers
        except BROKEN as error:
            raise Lost(_words(error)) from None

    async def close(self) -> None:
        """Closes all connections."""
        await self._session.close()


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
