"""TLS: whether a certificate and its key can be served with, said before anything is loaded."""

from __future__ import annotations

import ssl
from pathlib import Path

from spark_engine.errors import OptionError


def check_tls(cert: str | None, key: str | None) -> None:
    """Raises OptionError for files that do not make a server's certificate; both None: no TLS."""
    if cert is None and key is None:
        return
    if cert is None or key is None:
        given, missing = ("--tls-cert", "--tls-key") if key is None else ("--tls-key", "--tls-cert")
        raise OptionError(f"{given} needs {missing} beside it: a certificate and its key")
    for name, path in (("--tls-cert", cert), ("--tls-key", key)):
        if not Path(path).is_file():
            raise OptionError(f"{name} is {path}, which is no file; give a file in PEM form")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, lambda: "")
    except (OSError, ssl.SSLError) as error:  # SSLError is an OSError, and says so in its own words
        words = f"--tls-cert {cert} and --tls-key {key} are no certificate and its key ({error})"
        mend = "give PEM files that belong together, the key without a password"
        raise OptionError(f"{words}; {mend}") from None
