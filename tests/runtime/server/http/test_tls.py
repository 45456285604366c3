"""TLS: what cannot be served with is refused before anything is loaded; the rest is served."""

import asyncio
import hashlib
import os
import signal
import ssl
import subprocess
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import httpx
import pytest
import uvicorn

from spark_engine.errors import OptionError
from spark_engine.runtime.server.http import tls as module
from spark_engine.runtime.server.http.connections import Connections
from spark_engine.runtime.server.http.tls import ServerTls
from spark_engine.runtime.server.operation.keys import Keyring
from spark_engine.runtime.server.process.http_server import config_of
from spark_engine.runtime.server.process.lifecycle import on_hangup
from spark_engine.runtime.server.process.options import ServerOptions
from spark_engine.runtime.server.process.port import bind
from tests.certificates import OPENSSL, needs_openssl, pair
from tests.runtime.server.api.api_client import ApiClient
from tests.runtime.server.http.served_app import serving

pytestmark = needs_openssl


def _expired(folder: Path) -> tuple[str, str]:
    """A pair with a certificate that expires in the second in which it is made."""
    assert OPENSSL is not None
    (_, key), cert, asked = pair(folder, "expired"), folder / "ended.crt", folder / "ended.csr"
    ask = ["req", "-new", "-key", key, "-subj", "/CN=test", "-out", str(asked)]
    sign = ["x509", "-req", "-in", str(asked), "-signkey", key, "-days", "0", "-out", str(cert)]
    for made in (ask, sign):
        subprocess.run([OPENSSL, *made], check=True, capture_output=True)
    return str(cert), key


def test_files_that_make_no_certificate_are_refused(tmp_path: Path) -> None:
    cert, key = pair(tmp_path, "one")
    _, other = pair(tmp_path, "two")
    ServerTls.of(None, None)
    ServerTls.of(cert, key)
    empty = tmp_path / "empty"
    empty.touch()
    for given, words in (
        ((cert, None), "--tls-cert needs --tls-key"),
        ((None, key), "--tls-key needs --tls-cert"),
        ((cert, str(tmp_path / "none")), "--tls-key is .*none, which is no file"),
        ((str(tmp_path), key), "--tls-cert is .*, which is no file"),
        ((cert, other), "is the key of another certificate than"),
        ((str(empty), key), "no certificate and its key"),
        (_expired(tmp_path), r"--tls-cert .*ended\.crt: .*has expired.*valid now"),
    ):
        with pytest.raises(OptionError, match=words):
            ServerTls.of(*given)


def test_a_locked_key_and_one_that_cannot_be_read_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = pair(tmp_path, "one")
    locked = tmp_path / "locked.key"
    command = [str(OPENSSL), "pkey", "-in", key, "-aes256", "-passout", "pass:x", "-out"]
    subprocess.run([*command, str(locked)], check=True, capture_output=True)
    with pytest.raises(OptionError, match="the key without a password"):
        ServerTls.of(cert, str(locked))

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", key)

    monkeypatch.setattr(module.ssl.SSLContext, "load_cert_chain", refuse)
    with pytest.raises(OptionError, match=r"one\.key cannot be read \(Permission denied\)"):
        ServerTls.of(cert, key)


def _serial(port: int) -> str:
    """Of the certificate that a new connection gets."""
    pem = ssl.get_server_certificate(("127.0.0.1", port), timeout=30)
    return hashlib.sha256(pem.encode()).hexdigest()


async def test_a_hangup_loads_the_certificate_again_and_keeps_it_where_the_new_one_is_broken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, expired = (
        [Path(p).read_bytes() for p in made]
        for made in (pair(tmp_path, "one"), pair(tmp_path, "two"), _expired(tmp_path))
    )
    files = tmp_path / "cert", tmp_path / "key"

    def put(pair: Sequence[bytes]) -> None:
        for path, data in zip(files, pair, strict=True):
            path.write_bytes(data)

    put(first)
    caplog.set_level("INFO")
    tls = ServerTls.of(str(files[0]), str(files[1]))
    assert tls is not None
    config = uvicorn.Config(ApiClient("hello").app, port=0, log_level="critical")
    config.ssl_certfile, config.ssl_keyfile = map(str, files)
    tls.serve_with(config, 60.0)
    seen = []
    with on_hangup(Keyring(), tls):
        async with serving(config) as port:
            seen.append(await asyncio.to_thread(_serial, port))
            _, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=ssl._create_unverified_context()
            )
            for new in ((second[0], first[1]), expired, (b"", b""), second):
                put(new)
                lines = len(caplog.records)
                os.kill(os.getpid(), signal.SIGHUP)
                while len(caplog.records) == lines:
                    await asyncio.sleep(0.01)
                seen.append(await asyncio.to_thread(_serial, port))
            assert not writer.is_closing(), "connections that are open stay so"
            writer.close()
    assert seen[:4] == [seen[0]] * 4 and seen[4] != seen[0]
    words = [r.getMessage() for r in caplog.records if r.name.endswith("tls")]
    assert "the key of another certificate" in words[0] and "still used" in words[0]
    assert "has expired" in words[1] and "no certificate and its key" in words[2]
    assert "certificate loaded" in words[3] and "expires on 20" in words[3]


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\xff\xff", b"\x16\x03\x01\x02\x00\x01"])
async def test_half_a_handshake_is_closed_in_time(tmp_path: Path, sent: bytes) -> None:
    """A connection takes a descriptor before its handshake has ended."""
    config = uvicorn.Config(ApiClient("hello").app, port=0, log_level="critical")
    config.ssl_certfile, config.ssl_keyfile = pair(tmp_path, "one")
    tls = ServerTls.of(config.ssl_certfile, config.ssl_keyfile)
    assert tls is not None
    tls.serve_with(config, 0.2)
    async with serving(config) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        found = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        assert found == b""


async def test_handshakes_are_counted_and_the_oldest_is_closed(tmp_path: Path) -> None:
    cert, key = pair(tmp_path, "one")
    connections = Connections(2, 60.0)
    options = ServerOptions(tls_cert=cert, tls_key=key)
    config, tls = config_of(ApiClient("hello").app, connections, options), ServerTls.of(cert, key)
    assert tls is not None

    async def get(port: int) -> int:
        known = ssl.create_default_context(cafile=cert)
        async with httpx.AsyncClient(verify=known, timeout=60) as client:
            return (await client.get(f"https://127.0.0.1:{port}/health")).status_code

    tls.serve_with(config, 60.0)
    with closing(bind("127.0.0.1", 0)) as listener:
        listener.accepted = connections.shake
        async with serving(config, listener) as port:
            first = await asyncio.open_connection("127.0.0.1", port)
            assert [await get(port) for _ in range(4)] == [200] * 4, "ended ones are none"
            second = await asyncio.open_connection("127.0.0.1", port)
            assert await get(port) == 200
            assert await first[0].read() == b"" and not second[0].at_eof()
            for _, writer in (first, second):
                writer.close()
