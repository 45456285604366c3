"""Images by URL: what may be reached, and limits; servers on this machine take the place of others.

Names are looked up in a table, and connections to public addresses go to a local server.
"""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from spark_engine.errors import OptionError
from spark_engine.runtime.images import fetch as module
from spark_engine.runtime.images.sizes import BadImage
from tests.certificates import needs_openssl, pair

PUBLIC, SIXTH = "93.184.216.34", "2606:4700::1"
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def _reply(body: bytes, *headers: str, status: str = "200 OK", sized: bool = True) -> bytes:
    lines = [f"HTTP/1.1 {status}", *headers, *([f"Content-Length: {len(body)}"] if sized else [])]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def _moved(to: str, status: str = "302 Found") -> bytes:
    return _reply(b"", f"Location: {to}", status=status)


class World:
    """A table of names, a server's answers by path, and what was asked of both."""

    def __init__(self) -> None:
        self.names: dict[str, list[list[str]]] = {"img.example": [[PUBLIC]]}
        self.answers: dict[str, bytes | Answer] = {}
        self.looked_up: list[str] = []
        self.connected: list[tuple[str, int, bool, str]] = []
        self.heads: list[str] = []
        self.port = 0
        self.ended = asyncio.Event()

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        """Each look-up gives a name's next list of addresses; the last one stays."""
        self.looked_up.append(host)
        if host not in self.names:
            raise OSError("no such name")
        rows = self.names[host]
        return rows.pop(0) if len(rows) > 1 else rows[0]

    async def connect(
        self, address: str, port: int, tls: ssl.SSLContext | None, host: str
    ) -> module.Streams:
        self.connected.append((address, port, tls is not None, host))
        if address == SIXTH:
            raise OSError("no route")
        return await module._open("127.0.0.1", self.port, tls, host)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(head)
            answer = self.answers[head.split()[1]]
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                await answer(writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self.ended.set()
            writer.close()


@asynccontextmanager
async def _world(
    domains: Sequence[str], tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[World, module.Fetcher]]:
    world = World()
    server = await asyncio.start_server(world.serve, "127.0.0.1", 0, ssl=tls)
    world.port = server.sockets[0].getsockname()[1]
    fetcher = module.Fetcher(module.media_domains(domains), world.resolve, world.connect)
    try:
        yield world, fetcher
    finally:
        fetcher.close()
        server.close()


async def _refused(fetcher: module.Fetcher, url: str) -> str:
    with pytest.raises(BadImage) as caught:
        await fetcher.fetch(url)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    return str(caught.value)


async def test_a_body_is_fetched_from_the_address_that_was_checked() -> None:
    async with _world(["img.example", "*.cdn.example:8080"]) as (world, fetcher):
        world.names["img.example"] = [[SIXTH, PUBLIC]]
        world.names["a.b.cdn.example"] = [[PUBLIC]]
        world.answers["/a%20b.png?q=%C3%A9&x=1"] = _reply(b"pixels")
        world.answers["/"] = _reply(b"abc", "X: HTTP/1.1", sized=False)  # until it closes
        assert await fetcher.fetch("http://IMG.example./a b.png?q=é&x=1#part") == b"pixels"
        assert await fetcher.fetch("http://a.b.cdn.example:8080") == b"abc"
        assert world.connected == [
            (PUBLIC, 80, False, "img.example"),
            (PUBLIC, 8080, False, "a.b.cdn.example"),
        ]
        assert "Host: img.example\r\n" in world.heads[0]
        assert "Host: a.b.cdn.example:8080\r\n" in world.heads[1]


async def test_redirects_are_followed_and_each_is_checked() -> None:
    async with _world(["img.example", "*.cdn.example"]) as (world, fetcher):
        world.names["x.cdn.example"] = [[PUBLIC]]
        world.names["in.cdn.example"] = [["10.0.0.7"]]
        world.answers |= {
            "/1": _moved("//x.cdn.example/2", "301 Moved"),
            "/2": _moved("3", "307 Temporary"),
            "/3": _moved("http://img.example/4", "308 Permanent"),
            "/4": _reply(b"there"),
            "/in": _moved("http://in.cdn.example/"),
            "/local": _moved("http://127.0.0.1/"),
            "/file": _moved("file:///etc/passwd"),
            "/user": _moved("http://a:b@img.example/"),
            "/bad": _moved("http://[::1"),
            "/loop": _moved("/loop"),
        }
        assert await fetcher.fetch("http://img.example/1") == b"there"
        for path, words in {
            "/in": "in.cdn.example has no public address",
            "/local": "127.0.0.1:80, from which images are not fetched",
            "/file": "has the scheme 'file'",
            "/user": "must have only a host and a port",
            "/bad": "is no URL",
            "/loop": "redirected more than 3 times",
        }.items():
            assert words in await _refused(fetcher, f"http://img.example{path}")
        assert {address for address, *_ in world.connected} == {PUBLIC}
        assert sum("GET /loop " in head for head in world.heads) == 4


async def test_a_name_that_changes_its_address_is_looked_up_once_a_hop() -> None:
    async with _world(["img.example"]) as (world, fetcher):
        world.names["img.example"] = [[PUBLIC], ["127.0.0.1"]]
        world.answers |= {"/": _reply(b"a"), "/next": _moved("/")}
        assert await fetcher.fetch("http://img.example/") == b"a"
        assert world.looked_up == ["img.example"]
        world.names["img.example"] = [[PUBLIC], ["127.0.0.1"]]
        assert "no public address" in await _refused(fetcher, "http://img.example/next")
        world.names["img.example"] = [["192.168.1.1", PUBLIC, "::ffff:127.0.0.1"]]
        assert await fetcher.fetch("http://img.example/") == b"a"
        assert {address for address, *_ in world.connected} == {PUBLIC}


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://other.example/", "at other.example:80, from which images are not fetched"),
        ("http://sub.img.example/", "from which images are not fetched"),
        ("http://cdn.example/", "from which images are not fetched"),  # *. is not the name itself
        ("http://evilcdn.example/", "from which images are not fetched"),
        ("http://img.example:8080/", "img.example:8080, from which"),
        ("https://img.example:80/", "img.example:80, from which"),
        ("http://img.example@other.example/", "must have only a host and a port"),
        ("http://other.example\\@img.example/", "must have only a host and a port"),
        ("http://user:pass@img.example/", "must have only a host and a port"),
        ("http://a b.cdn.example/", "must have only a host and a port"),
        ("http:///path", "must have only a host and a port"),
        ("http://2130706433/", "from which images are not fetched"),
        ("http://[::1]/", "from which images are not fetched"),
        ("http://img.example:99999/", "is no URL"),
        ("http://" + "a" * 64 + ".cdn.example/", "is no URL"),
        ("ftp://img.example/", "has the scheme 'ftp': use https, http or data"),
        ("file:///etc/passwd", "has the scheme 'file'"),
        ("img.example/a.png", "has the scheme ''"),
        ("http://img.example/" + "a" * 8192, "has 8211 characters; at most 8192"),
        ("http://nowhere.cdn.example/", "there is no host nowhere.cdn.example"),
        ("http://six.cdn.example/", "six.cdn.example cannot be reached at port 80"),
    ],
)
async def test_what_may_not_be_reached_is_not_connected_to(url: str, words: str) -> None:
    async with _world(["img.example", "*.cdn.example"]) as (world, fetcher):
        world.names["six.cdn.example"] = [[SIXTH]]
        assert words in await _refused(fetcher, url)
        assert [address for address, *_ in world.connected if address != SIXTH] == []


def test_only_addresses_of_the_open_internet_are_public() -> None:
    inside = """127.0.0.1 10.1.2.3 172.16.0.1 192.168.0.1 169.254.169.254 100.64.0.1 0.0.0.0
    198.18.0.1 224.0.0.1 240.0.0.1 255.255.255.255 ::1 :: fe80::1 fe80::1%eth0 fc00::1 fec0::1
    ff02::1 ::ffff:10.0.0.1 ::ffff:8.8.8.8 ::7f00:1 64:ff9b::7f00:1 64:ff9b::808:808
    2002:7f00:1::1 2001:0:1::1 2001:db8::1 0x7f.1 name"""
    assert [address for address in inside.split() if module.is_public(address)] == []
    assert module.is_public(PUBLIC) and module.is_public(SIXTH)


async def test_a_body_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 20_000)

    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(_reply(b"", "Transfer-Encoding: chunked", sized=False))
        while True:
            writer.write(b"1\r\na\r\n" * 10_000)
            await writer.drain()

    async with _world(["img.example"]) as (world, fetcher):
        said = b"HTTP/1.1 200 OK\r\nContent-Length: 20001\r\n\r\n"
        world.answers |= {"/said": said, "/endless": endless}
        world.answers |= {"/fits": _reply(bytes(20_000))}
        for path in ("/said", "/endless"):
            world.ended.clear()
            words = await _refused(fetcher, f"http://img.example{path}")
            assert "more than 20000 bytes: send a smaller one" in words
            await asyncio.wait_for(world.ended.wait(), 10)  # the connection was closed
        assert len(await fetcher.fetch("http://img.example/fits")) == 20_000


async def test_a_slow_host_is_left_at_the_deadline_however_often_it_sends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST_S", 0.3)

    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\n")
        while True:
            writer.write(b"a")
            await writer.drain()
            await asyncio.sleep(0.01)

    async with _world(["img.example"]) as (world, fetcher):
        world.answers["/"] = drip
        start = time.monotonic()
        assert "was not fetched in 0.3 s" in await _refused(fetcher, "http://img.example/")
        assert time.monotonic() - start < 5
        await asyncio.wait_for(world.ended.wait(), 10)


async def test_a_fetch_that_is_cancelled_closes_its_connection() -> None:
    async with _world(["img.example"]) as (world, fetcher):
        asked = asyncio.Event()

        async def silent(writer: asyncio.StreamWriter) -> None:
            asked.set()
            await writer.wait_closed()

        world.answers["/"] = silent
        task = asyncio.create_task(fetcher.fetch("http://img.example/"))
        await asyncio.wait_for(asked.wait(), 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        world.answers["/"] = _reply(b"next")
        assert await fetcher.fetch("http://img.example/") == b"next"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (_reply(b"no", status="404 Not Found"), "host answered 404: send a data: URI"),
        (_reply(b"", status="302 Found"), "host answered 302"),  # without an address
        (_reply(b"", status="204 No Content"), "host answered 204"),
        (b"SSH-2.0-OpenSSH_9\r\n\r\n", "gave no valid HTTP answer"),
        (b"", "gave no valid HTTP answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", "gave no valid HTTP answer"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
            "gave no valid HTTP answer",
        ),
        (b"HTTP/1.1 101 Switching\r\nUpgrade: a\r\n\r\n", "gave no valid HTTP answer"),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 40_000, "gave no valid HTTP answer"),
    ],
)
async def test_other_answers_are_refused(answer: bytes, words: str) -> None:
    async with _world(["img.example"]) as (world, fetcher):
        world.answers["/"] = answer
        assert words in await _refused(fetcher, "http://img.example/")


@needs_openssl
async def test_https_checks_the_certificate_for_the_name(tmp_path: Path) -> None:
    certificate, key = pair(tmp_path, "host")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    async with _world(["127.0.0.1", "img.example"], tls) as (world, fetcher):
        world.names["127.0.0.1"] = [[PUBLIC]]
        world.answers["/"] = _reply(b"secret")
        assert "no valid certificate" in await _refused(fetcher, "https://127.0.0.1/")
        fetcher._tls.load_verify_locations(certificate)
        assert await fetcher.fetch("https://127.0.0.1/") == b"secret"
        assert "no valid certificate" in await _refused(fetcher, "https://img.example/")
        assert world.connected[0] == (PUBLIC, 443, True, "127.0.0.1")


async def test_the_system_looks_names_up() -> None:
    fetcher = module.Fetcher(module.media_domains(["localhost", "127.0.0.1"]))
    assert "127.0.0.1" in await fetcher._look_up("127.0.0.1", 80)
    assert "no public address" in await _refused(fetcher, "http://127.0.0.1/")
    fetcher.close()


def test_names_of_the_option_are_checked() -> None:
    found = module.media_domains(["A.example, *.b.example:8443", "10.0.0.1"])
    assert found == (
        module.MediaDomain("a.example", False, None),
        module.MediaDomain("b.example", True, 8443),
        module.MediaDomain("10.0.0.1", False, None),
    )
    for name in ("*", "http://a.example", "a.example/x", "", "a.example:0", "a.example:65536"):
        with pytest.raises(OptionError, match="--media-domains has "):
            module.media_domains([name])
