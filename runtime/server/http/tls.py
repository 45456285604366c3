"""TLS: the server's certificate, checked before anything is loaded, and reloaded on request.

Knows certificates, handshakes and uvicorn's context; knows no signal and no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spark_engine.errors import OptionError

if TYPE_CHECKING:
    import uvicorn

log = logging.getLogger(__name__)


class ServerTls:
    """The TLS context of a listener; `reload` replaces it for later connections.

    `cert` and `key` are PEM files. Raises OptionError for files that cannot be used.
    """

    def __init__(self, cert: str, key: str) -> None:
        self._cert, self._key = cert, key
        self._current = load(cert, key).context
        self.context = self._current  # of the listener: each connection uses the current one
        self.context.sni_callback = self._choose

    @classmethod
    def of(cls, cert: str | None, key: str | None) -> ServerTls | None:
        """None where there are no files, which is plain HTTP. Raises OptionError."""
        if cert is not None and key is not None:
            return cls(cert, key)
        if cert is not None or key is not None:
            names = "--tls-cert", "--tls-key"
            given, missing = names if key is None else reversed(names)
            raise OptionError(f"{given} needs {missing} as well: a certificate and its key")
        return None

    def serve_with(self, config: uvicorn.Config, handshake_s: float) -> None:
        """Makes uvicorn's listener use this context instead of the one that it loads itself, and
        close connections with a longer handshake. For listeners of the running loop."""
        config.load()
        config.ssl = self.context
        loop = asyncio.get_running_loop()
        create_server = loop.create_server

        async def create(*given: Any, **options: Any) -> asyncio.Server:
            """uvicorn has no option for it, and asyncio waits 60 s."""
            if options.get("ssl") is not None:
                options["ssl_handshake_timeout"] = handshake_s
            return await create_server(*given, **options)

        loop.create_server = create  # type: ignore[method-assign]

    def reload(self) -> bool:
        """Reads both files again. Files with an error are logged, and the old pair is kept."""
        try:
            found = load(self._cert, self._key)
        except OptionError as error:
            log.error("%s; the certificate that was loaded before is still used", error)
            return False
        self._current = found.context
        log.info("certificate loaded from %s; it expires on %s", self._cert, found.expires)
        return True

    def _choose(
        self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, _: ssl.SSLContext
    ) -> None:
        """OpenSSL calls this in each handshake, also where the client sends no host name."""
        connection.context = self._current


@dataclass(frozen=True)
class Certificate:
    """A valid pair of files. `expires`: as YYYY-MM-DD, UTC."""

    context: ssl.SSLContext
    expires: str


def load(cert: str, key: str) -> Certificate:
    """A certificate and its key, checked as clients do.

    Raises OptionError for files that are missing or no PEM, for a key of another certificate or
    with a password, and for a certificate that clients refuse: expired or not valid yet.
    """
    for name, path in (("--tls-cert", cert), ("--tls-key", key)):
        if not Path(path).is_file():
            raise OptionError(f"{name} is {path}, which is no file; give a file in PEM form")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, lambda: "")
    except (OSError, ssl.SSLError) as error:  # SSLError is an OSError
        raise OptionError(_why_no_pair(cert, key, error)) from None
    try:
        shown = _handshake(context, cert)
    except ssl.SSLCertVerificationError as error:
        words = f"--tls-cert {cert}: clients refuse this certificate: {error.verify_message}"
        raise OptionError(f"{words}; give one that is valid now") from None
    except ssl.SSLError as error:
        words = f"--tls-cert {cert} and --tls-key {key}: no TLS handshake succeeds with them"
        raise OptionError(f"{words} ({error.reason or error})") from None
    end = datetime.fromtimestamp(ssl.cert_time_to_seconds(str(shown["notAfter"])), UTC)
    return Certificate(context, f"{end:%Y-%m-%d}")


def _why_no_pair(cert: str, key: str, error: OSError) -> str:
    """The error of files that OpenSSL refuses, with a remedy."""
    if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
        return (
            f"--tls-key {key} is the key of another certificate than --tls-cert {cert}; "
            "give the key that this certificate was made with"
        )
    if isinstance(error, ssl.SSLError):
        return (
            f"--tls-cert {cert} and --tls-key {key} are no certificate and its key ({error}); "
            "give two PEM files, the key without a password"
        )
    which = error.filename or f"{cert} or {key}"
    return f"--tls-cert and --tls-key: {which} cannot be read ({error.strerror})"


def _handshake(context: ssl.SSLContext, cert: str) -> dict[str, object]:
    """The certificate that a client with `cert` as its trust anchor gets in a handshake in memory.

    Raises SSLError with the reason if the client refuses the certificate.
    """
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False  # names are checked by clients
    trusting.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    trusting.load_verify_locations(cert)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    waiting = [client, server]
    for _ in range(10):  # two rounds suffice
        for side in tuple(waiting):
            try:
                side.do_handshake()
                waiting.remove(side)
            except ssl.SSLWantReadError:
                continue
        if not waiting:
            break
    return dict(client.getpeercert() or {})
