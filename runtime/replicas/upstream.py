"""HTTP client for the replicas.

The only file that knows aiohttp in the runtime. A broken connection raises `Lost`.
"""

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

import aiohttp
from yarl import URL

Headers = Sequence[tuple[str, str]]
Parts = Sequence[bytes | bytearray]  # of a body, in order
CONNECT_S = 5.0
READ = 1 << 16  # bytes at a time
END = b"\n\n"
MOST_EVENT = 256 << 20  # bytes of an event: an answer of 256K tokens with all options
BROKEN = (aiohttp.ClientError, OSError, TimeoutError, EOFError)


class Lost(Exception):
    """A replica could not be reached, or broke its answer."""


class ConnectRefused(Lost):
    """The connection was refused: the server drains, or there is none."""


class Unsendable(ValueError):
    """A request that cannot be encoded as HTTP: an error of its sender."""


class UpstreamAnswer:
    """An answer after its headers."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers: Headers = tuple(response.headers.items())

    @property
    def streams(self) -> bool:
        return bool(self._response.content_type == "text/event-stream")

    async def whole(self) -> bytes:
        """The whole body. Raises Lost."""
        try:
            return bytes(await self._response.read())
        except BROKEN as error:
            raise Lost(_words(error)) from None

    async def parts(self) -> AsyncIterator[bytes]:
        """The body in parts, as they arrive. Raises Lost."""
        try:
            while part := await self._response.content.readany():
                yield part
        except BROKEN as error:
            raise Lost(_words(error)) from None


class Events:
    """The events of one stream. Each byte is searched once, also in a large event."""

    def __init__(self) -> None:
        self._left = bytearray()

    def take(self, part: bytes) -> bytes:
        """All complete events that were not returned yet. Raises Lost for an event that is too
        long."""
        seen = max(0, len(self._left) - len(END) + 1)
        self._left += part
        at = self._left.rfind(END, seen)
        if at < 0:
            if len(self._left) > MOST_EVENT:
                raise Lost(f"an event has more than {MOST_EVENT >> 20} MiB")
            return b""
        whole = bytes(self._left[: at + len(END)])
        del self._left[: at + len(END)]
        return whole

    @property
    def left(self) -> bytes:
        """Bytes after the last complete event."""
        return bytes(self._left)


class Upstream:
    """Connections to all replicas. Create it within the event loop."""

    def __init__(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60, ttl_dns_cache=10)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            read_bufsize=READ,
            cookie_jar=aiohttp.DummyCookieJar(),  # one client's cookies must not reach another
        )

    @contextlib.asynccontextmanager
    async def ask(
        self,
        method: str,
        url: str,
        headers: Headers = (),
        body: Parts = (),
        sent: Callable[[], None] | None = None,
    ) -> AsyncIterator[UpstreamAnswer]:
        """The answer; leaving the block early aborts the request. Raises Lost, Unsendable. `url` is
        sent unchanged, and the parts of `body` in their order. With `sent`, the body is freed once
        it is sent, and `sent` is called."""
        head, data = list(headers), None
        if body:
            head.append(("Content-Length", str(sum(map(len, body)))))
            data = _slices(body, sent)
        try:
            asked = self._session.request(
                method, URL(url, encoded=True), headers=head, data=data, allow_redirects=False
            )
            del data
            del body  # freed before the answer arrives
            response = await asked
        except (aiohttp.InvalidURL, ValueError) as error:
            raise Unsendable(_words(error)) from None
        except BROKEN as error:
            raise Lost(_words(error)) from None
        try:
            yield UpstreamAnswer(response)
        finally:
            response.release() if response.content.at_eof() else response.close()

    async def get(self, url: str, limit_s: float, headers: Headers = ()) -> tuple[int, bytes]:
        """(status, body) of a small answer. Raises Lost, also after `limit_s` seconds, and
        ConnectRefused."""
        timeout = aiohttp.ClientTimeout(total=limit_s)
        try:
            asked = self._session.get(
                URL(url, encoded=True),
                headers=list(headers),
                timeout=timeout,
                allow_redirects=False,
            )
            async with asked as response:
                return response.status, await response.read()
        except aiohttp.ClientConnectorError as error:
            refused = isinstance(error.os_error, ConnectionRefusedError)
            raise (ConnectRefused if refused else Lost)(_words(error)) from None
        except (*BROKEN, ValueError) as error:
            raise Lost(_words(error)) from None

    async def close(self) -> None:
        await self._session.close()


async def _slices(body: Parts, sent: Callable[[], None] | None) -> AsyncIterator[bytes | bytearray]:
    for part in body:
        for at in range(0, len(part), READ):
            yield part[at : at + READ]
    del body
    if sent is not None:
        sent()


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
