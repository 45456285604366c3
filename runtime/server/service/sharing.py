"""The salt of a request: it shares the prefix cache with requests of the same salt.

Knows the salts of API keys and of bodies; no engine.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from spark_engine.runtime.server.operation.http_request import current

SALT_BYTES = 16  # of a digest


def salt_of(given: str | None) -> bytes:
    """The current request's: a digest of its `cache_salt` (`given`) and of its key's salt. Requests
    share cached prefixes only where both are equal."""
    request = current()
    account = None if request is None else request.account
    of_key = None if account is None else account.key.salt
    if of_key is None and given is None:
        return b""
    both = msgspec.msgpack.encode([_bytes(of_key), _bytes(given)])
    return blake2b(both, digest_size=SALT_BYTES).digest()


def _bytes(text: str | None) -> bytes | None:
    """UTF-8 of any text: JSON may hold halves of surrogate pairs."""
    return None if text is None else text.encode("utf-8", "surrogatepass")
