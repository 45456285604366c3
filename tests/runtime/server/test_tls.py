"""TLS: what cannot be served with is refused before anything is loaded; the rest is served."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest
import uvicorn

from spark_engine.errors import OptionError
from spark_engine.runtime.server.tls import check_tls
from tests.runtime.server.api.api_client import ApiClient

OPENSSL = shutil.which("openssl")
needs_openssl = pytest.mark.skipif(OPENSSL is None, reason="openssl, which makes certificates")


def _pair(folder: Path, name: str) -> tuple[str, str]:
    """A certificate for 127.0.0.1 and its key."""
    assert OPENSSL is not None
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-x509"]
    name_ = ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    files = ["-keyout", str(key), "-out", str(cert)]
    subprocess.run([OPENSSL, "req", *kind, *name_, *files], check=True, capture_output=True)
    return str(cert), str(key)


@needs_openssl
def test_files_that_make_no_certificate_are_refused(tmp_path: Path) -> None:
    cert, key = _pair(tmp_path, "one")
    _, other = _pair(tmp_path, "two")
    check_tls(None, None)
    check_tls(cert, key)
    empty = tmp_path / "empty"
    empty.touch()
    for given, words in (
        ((cert, None), "--tls-cert needs --tls-key"),
        ((None, key), "--tls-key needs --tls-cert"),
        ((cert, str(tmp_path / "none")), "--tls-key is .*none, which is no file"),
        ((str(tmp_path), key), "--tls-cert is .*, which is no file"),
        ((cert, other), "no certificate and its key"),
        ((str(empty), key), "no certificate and its key"),
    ):
        with pytest.raises(OptionError, match=words):
            check_tls(*given)


@needs_openssl
def test_https_is_served(tmp_path: Path) -> None:
    cert, key = _pair(tmp_path, "one")
    app = ApiClient("hello").app
    config = uvicorn.Config(app, port=0, ssl_certfile=cert, ssl_keyfile=key, log_level="critical")

    async def ask() -> int:
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        known = ssl.create_default_context(cafile=cert)
        async with httpx.AsyncClient(verify=known, timeout=60) as client:
            status = (await client.get(f"https://127.0.0.1:{port}/health")).status_code
        server.should_exit = True
        await task
        return status

    assert asyncio.run(ask()) == 200
