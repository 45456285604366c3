"""Certificates for tests, made by openssl."""

import shutil
import subprocess
from pathlib import Path

import pytest

OPENSSL = shutil.which("openssl")
needs_openssl = pytest.mark.skipif(OPENSSL is None, reason="openssl, which makes certificates")


def pair(folder: Path, name: str) -> tuple[str, str]:
    """A certificate for 127.0.0.1 and its key."""
    assert OPENSSL is not None
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-x509"]
    name_ = ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    files = ["-keyout", str(key), "-out", str(cert)]
    subprocess.run([OPENSSL, "req", *kind, *name_, *files], check=True, capture_output=True)
    return str(cert), str(key)
