"""Fetches the image that a request names by its address: `--media-domains`.

A request must not reach what only this machine can: names are looked up once for each hop, private
addresses are refused, and the connection goes to an address that was checked. No proxy is used.
Knows HTTP and addresses; whether the bytes are an image is found by `decode`.
"""

import asyncio
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TypeAlias
from urllib.parse import SplitResult, quote, urljoin, urlsplit

import h11

from spark_engine.errors import OptionError
from spark_engine.runtime.images.sizes import BadImage

MOST_BYTES = 10 << 20  # of an image
MOST_S = 5.0  # for all of a fetch: names, connections, redirects, body
MOST_REDIRECTS, MOST_ADDRESSES, MOST_URL = 3, 3, 8192
AT_A_TIME = 8  # fetches of a server; others wait
PIECE = 4 << 10  # bytes that are parsed between two turns of the event loop
PORTS = {"http": 80, "https": 443}
REDIRECTS = (301, 302, 303, 307, 308)
_DATA = "send the image as a data: URI"
_NAME = r"(?:[a-z0-9_-]+(?:\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\])"
_DOMAIN = re.compile(rf"(\*\.)?({_NAME})(?::([0-9]{{1,5}}))?")
_KEPT = "/%:@!$&'()*+,;=~?"  # characters of a path or query that are sent as they are
Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]
Streams: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect: TypeAlias = Callable[[str, int, ssl.SSLContext | None, str], Awaitable[Streams]]


@dataclass(frozen=True)
class MediaDomain:
    """One name of `--media-domains`. `below`: names under it, and not itself. `port`: the only one;
    None: 80 for http and 443 for https."""

    name: str
    below: bool
    port: int | None

    def allows(self, host: str, port: int, usual: int) -> bool:
        known = host.endswith(f".{self.name}") if self.below else host == self.name
        return known and port == (self.port or usual)


def media_domains(given: Sequence[str]) -> tuple[MediaDomain, ...]:
    """The names of `--media-domains`, also several separated by commas. Raises OptionError."""
    found = []
    for name in (name.strip() for one in given for name in one.split(",")):
        match = _DOMAIN.fullmatch(name.lower())
        if match is None or not 0 < int(match[3] or 1) < 1 << 16:
            raise OptionError(
                f"--media-domains has {name!r}: give a name without scheme and path, like "
                "images.example, *.images.example or images.example:8443"
            )
        found.append(MediaDomain(match[2], bool(match[1]), int(match[3]) if match[3] else None))
    return tuple(found)


class Fetcher:
    """Fetches from `domains` alone. For one event loop. `resolve` and `connect` replace the
    system's."""

    def __init__(
        self,
        domains: Sequence[MediaDomain],
        resolve: Resolve | None = None,
        connect: Connect | None = None,
    ) -> None:
        self._domains = tuple(domains)
        self._resolve, self._connect = resolve or self._look_up, connect or _open
        self._turns = asyncio.Semaphore(AT_A_TIME)
        self._tls = ssl.create_default_context()
        # its own threads: a name server that does not answer delays no other work
        self._threads = ThreadPoolExecutor(AT_A_TIME, "media names")

    async def fetch(self, url: str) -> bytes:
        """What `url` has. May be cancelled at any time.

        Raises BadImage for what is not allowed, too large, too slow or not there.
        """
        async with self._turns:
            try:
                async with asyncio.timeout(MOST_S):
                    return await self._follow(url)
            except TimeoutError:
                words = f"{_shown(url)} was not fetched in {MOST_S:g} s"
                raise BadImage(f"{words}: {_DATA}") from None

    async def _follow(self, url: str) -> bytes:
        to = self._target("", url)
        for _ in range(1 + MOST_REDIRECTS):
            found = await self._get(to)
            if isinstance(found, bytes):
                return found
            to = self._target(to.geturl(), found)
        raise BadImage(f"{_shown(url)} is redirected more than {MOST_REDIRECTS} times: {_DATA}")

    def _target(self, base: str, url: str) -> SplitResult:
        """The parts of a URL that may be fetched, with the host's name in lower case."""
        shown = _shown(url)
        if len(url) > MOST_URL:
            raise BadImage(f"{shown} has {len(url)} characters; at most {MOST_URL} are allowed")
        try:
            parts = urlsplit(urljoin(base, url))
            host, port = (parts.hostname or "").rstrip("."), parts.port
            host = f"[{host}]" if ":" in host else host.encode("idna").decode()
        except ValueError:
            raise BadImage(f"{shown} is no URL: send https://…, or a data: URI") from None
        if parts.scheme not in PORTS:
            raise BadImage(f"{shown} has the scheme {parts.scheme[:20]!r}: use https, http or data")
        if "@" in parts.netloc or not re.fullmatch(_NAME, host):
            raise BadImage(f"{shown} must have only a host and a port after //")
        usual = PORTS[parts.scheme]
        port = usual if port is None else port
        if not any(row.allows(host, port, usual) for row in self._domains):
            words = f"{shown} is at {host[:100]}:{port}, from which images are not fetched"
            raise BadImage(f"{words}: send a data: URI, or start the server with --media-domains")
        return parts._replace(netloc=host if port == usual else f"{host}:{port}")

    async def _get(self, to: SplitResult) -> bytes | str:
        """The body, or the address that it is at."""
        path = quote(to.path or "/", safe=_KEPT) + (to.query and f"?{quote(to.query, safe=_KEPT)}")
        headers = [("Host", to.netloc), ("User-Agent", "spark-engine"), ("Accept", "image/*")]
        headers += [("Accept-Encoding", "identity"), ("Connection", "close")]
        http = h11.Connection(h11.CLIENT)
        request = http.send(h11.Request(method="GET", target=path, headers=headers))
        reader, writer = await self._reach(to)
        try:
            writer.write((request or b"") + (http.send(h11.EndOfMessage()) or b""))
            return await _receive(http, reader)
        except (OSError, h11.ProtocolError):
            raise BadImage(f"{to.hostname} gave no valid HTTP answer: {_DATA}") from None
        finally:
            writer.transport.abort()

    async def _reach(self, to: SplitResult) -> Streams:
        """A connection to a checked address of the host."""
        host, port = to.hostname or "", to.port or PORTS[to.scheme]
        try:
            found = [a for a in await self._resolve(host, port) if is_public(a)]
        except (OSError, UnicodeError):
            raise BadImage(f"there is no host {host}: {_DATA}") from None
        if not found:
            raise BadImage(f"{host} has no public address: {_DATA}")
        tls = self._tls if to.scheme == "https" else None
        found.sort(key=lambda a: ":" in a)  # many machines have no route for IPv6
        for address in found[:MOST_ADDRESSES]:
            try:
                return await self._connect(address, port, tls, host)
            except ssl.SSLError as error:
                raise BadImage(f"{host} has no valid certificate ({error.reason})") from None
            except OSError:
                continue
        raise BadImage(f"{host} cannot be reached at port {port}: {_DATA}")

    def close(self) -> None:
        """Ends the threads that wait for nothing."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _look_up(self, host: str, port: int) -> Sequence[str]:
        loop = asyncio.get_running_loop()
        kind = socket.SOCK_STREAM
        rows = await loop.run_in_executor(
            self._threads, lambda: socket.getaddrinfo(host, port, type=kind)
        )
        return [str(row[4][0]) for row in rows]


def is_public(address: str) -> bool:
    """Whether an address is one of the open internet's, and holds no other one inside."""
    try:
        found = ip_address(address)
    except ValueError:
        return False
    if found.version == 6 and (found.ipv4_mapped or found.sixtofour or found.is_site_local):
        return False
    # is_reserved: also NAT64's
    return found.is_global and not found.is_multicast and not found.is_reserved


async def _open(address: str, port: int, tls: ssl.SSLContext | None, host: str) -> Streams:
    return await asyncio.open_connection(
        address, port, ssl=tls, server_hostname=host if tls else None
    )


async def _receive(http: h11.Connection, reader: asyncio.StreamReader) -> bytes | str:
    body = bytearray()
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            http.receive_data(await reader.read(PIECE))
            await asyncio.sleep(0)
        elif isinstance(event, h11.Response):
            headers = {bytes(name): bytes(value) for name, value in event.headers}
            if event.status_code in REDIRECTS and b"location" in headers:
                return headers[b"location"].decode("latin-1")
            if event.status_code != 200:
                raise BadImage(f"the image's host answered {event.status_code}: send a data: URI")
            _check_size(int(headers.get(b"content-length", b"0")))
        elif isinstance(event, h11.Data):
            body += event.data
            _check_size(len(body))
        elif isinstance(event, h11.EndOfMessage):
            return bytes(body)
        elif not isinstance(event, h11.InformationalResponse):
            raise h11.RemoteProtocolError("no answer")


def _check_size(size: int) -> None:
    if size > MOST_BYTES:
        raise BadImage(
            f"the image at this URL has more than {MOST_BYTES} bytes: send a smaller one"
        )


def _shown(url: str) -> str:
    return repr(url if len(url) <= 100 else f"{url[:97]}...")
