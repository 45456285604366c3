"""With whom a request shares the prefix cache: the salt of a `Request`.

Knows the salts of API keys and of bodies; no engine.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from spark_engine.runtime.server.operation.http_request import current

SALT_BYTES = 16  # of a digest


def salt_of(given: str | None) -> bytes:
    """Of the current request, with the `cache_salt` that it brings: a digest of that and of its
    key's salt. Requests share what was computed only where both are the same."""
    request = current()
    account = None if request is None else request.account
    of_key = None if account is None else account.key.salt
    if of_key is None and given is None:
        return b""
    both = msgspec.msgpack.encode([_bytes(of_key), _bytes(given)])
    return blake2b(both, digest_size=SALT_BYTES).digest()


def _bytes(text: str | None) -> bytes | None:
    """Any text: JSON may hold halves of characters."""
    return None if text is None else text.encode("utf-8", "surrogatepass")
