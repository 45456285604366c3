"""API keys: authentication, and rate limits of each key.

Knows their file, how they are compared, and what each has used. Knows no HTTP. All methods run in
one event loop.
"""

import hashlib
import hmac
import logging
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from spark_engine.errors import CapacityError, OptionError, RequestError

LIMITS = ("requests", "tokens", "at_once")  # the kinds of a key's limits
MINUTE = 60.0  # seconds
MOST_SALT = 256  # characters
_HEX = 64  # digits of a SHA-256
MOST_KEYS = 10_000  # each request's key is compared with every one
MOST_BYTES = 16 << 20  # of the file
MOST_LIMIT = 10**12  # requests or tokens a minute
SHORT = 16  # characters: a shorter key may be guessed
# SHA-256 of the keys in our examples, which are public
_SAMPLES = {
    hashlib.sha256(key.encode()).hexdigest()
    for key in ("replace-me-with-32-random-characters", "secret", "KEY", "…", "...")
}
log = logging.getLogger(__name__)


class Unauthorised(RequestError):
    """The request has no key, or an unknown one."""


class LimitReached(CapacityError):
    """A key has reached a limit. `kind`: one of LIMITS; `retry_s`: seconds until it may retry."""

    def __init__(self, message: str, kind: str, retry_s: float) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_s = retry_s


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `[[key]]` of the file. Of `key` and `sha256` (hexadecimal, of the key) it has one.

    None is no limit: requests and tokens (prompts and answers) a minute, and requests that wait
    or run at a time. `salt`: only requests of keys with the same salt share prompts in the prefix
    cache; None: all keys without a salt share.
    """

    name: str
    key: str | None = None
    sha256: str | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_requests: int | None = None
    salt: str | None = None

    @property
    def digest(self) -> bytes:
        """SHA-256 of the key."""
        if self.key is not None:
            return hashlib.sha256(self.key.encode()).digest()
        return bytes.fromhex(self.sha256 or "")


class _File(msgspec.Struct, forbid_unknown_fields=True):
    key: list[Key]


class TokenBucket:
    """A token bucket: `rate` a minute, a burst of one minute's. May be overdrawn, and recovers.

    `clock` is in seconds.
    """

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate = rate
        self._clock = clock
        self._level, self._at = rate, clock()

    @property
    def level(self) -> float:
        """The current level; below 0 where it is overdrawn."""
        now = self._clock()
        self._level = min(self.rate, self._level + (now - self._at) * self.rate / MINUTE)
        self._at = now
        return self._level

    def take(self, count: float) -> None:
        self._level = self.level - count

    def wait(self, count: float) -> float:
        """Seconds until the level is `count`, if none is taken until then."""
        return max(0.0, (count - self.level) * MINUTE / self.rate)

    def change(self, rate: float) -> None:
        """Another rate from now on; an overdraft remains."""
        self._level = min(self.level, rate)
        self.rate = rate


class Account:
    """A key and what it has used. When the file is reloaded, a key keeps its account."""

    def __init__(self, key: Key, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.open = 0  # requests that have not ended
        self.requests: TokenBucket | None = None
        self.tokens: TokenBucket | None = None
        self.change(key)

    def change(self, key: Key) -> None:
        """Another secret or other limits under the same name."""
        self.key, self._digest = key, key.digest
        self.requests = self._bucket(self.requests, key.requests_per_minute)
        self.tokens = self._bucket(self.tokens, key.tokens_per_minute)

    def is_for(self, digest: bytes) -> bool:
        """True if `digest` is the key's; in constant time."""
        return hmac.compare_digest(digest, self._digest)

    def enter(self) -> None:
        """Counts a request as running until `leave`. Raises LimitReached."""
        name, most = self.key.name, self.key.max_requests
        if most is not None and self.open >= most:
            words = f"key {name!r} has {self.open} open requests (at most {most}); retry"
            raise LimitReached(words, "at_once", 1)
        self._look("requests", self.requests)
        self._look("tokens", self.tokens)
        self.count()
        self.open += 1

    def count(self) -> None:
        """Counts a request that runs nothing: by the minute only. Raises LimitReached."""
        self._look("requests", self.requests)
        if self.requests is not None:
            self.requests.take(1)

    def _look(self, kind: str, bucket: TokenBucket | None) -> None:
        if bucket is not None and bucket.level < 1:
            wait = bucket.wait(1)
            words = f"key {self.key.name!r} has used its {bucket.rate:g} {kind} a minute; retry"
            raise LimitReached(f"{words} in {math.ceil(wait)} s", kind, wait)

    def leave(self) -> None:
        self.open -= 1

    def charge(self, tokens: int) -> None:
        """Tokens of a prompt or of an answer."""
        if self.tokens is not None:
            self.tokens.take(tokens)

    def _bucket(self, old: TokenBucket | None, rate: int | None) -> TokenBucket | None:
        if rate is None:
            return None
        if old is None:
            return TokenBucket(rate, self._clock)
        old.change(rate)
        return old


@dataclass
class Keyring:
    """All keys. Without any the server is open, and `find` is not called."""

    path: Path | None = None  # the file; None: there is none
    single: str | None = None  # a key without limits, in addition to the file's
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        """Raises OptionError for a file that cannot be read or is wrong."""
        self.accounts: dict[str, Account] = {}
        self._replace(self._read())

    @property
    def locked(self) -> bool:
        return self.path is not None or self.single is not None

    def find(self, secret: bytes) -> Account:
        """The account of a key, as UTF-8. Raises Unauthorised."""
        digest = hashlib.sha256(secret).digest()
        found = None
        for account in self.accounts.values():  # all of them, in constant time
            if account.is_for(digest):
                found = account
        if found is None:
            raise Unauthorised(
                "the API key is missing or wrong; send it as Authorization: Bearer KEY"
            )
        return found

    def reload(self) -> bool:
        """Reloads the file; an invalid one is logged, and the keys stay as they were."""
        try:
            keys = self._read()
        except OptionError as error:
            log.error("%s; the keys stay as they were", error)
            return False
        self._replace(keys)
        log.info("%d API keys loaded", len(self.accounts))
        return True

    def _replace(self, keys: list[Key]) -> None:
        known = self.accounts
        self.accounts = {k.name: known.get(k.name) or Account(k, self.clock) for k in keys}
        for key in keys:
            self.accounts[key.name].change(key)

    def _read(self) -> list[Key]:
        keys = [] if self.path is None else read_keys(self.path)
        if self.single is not None:
            if not self.single or self.single != self.single.strip():  # a request without a key
                words = "--api-key is empty or has space around it; give a key, or leave it out"
                raise OptionError(words)
            single = Key(name="api-key", key=self.single)
            _check_secret(single, "--api-key")
            if any(key.name == "api-key" for key in keys):
                raise OptionError(
                    f"{self.path}: the name api-key is that of --api-key's; rename it"
                )
            keys.append(single)
        return keys


def read_keys(path: Path) -> list[Key]:
    """The keys of a file. Raises OptionError that names the file, the key and the remedy."""
    given = f"--api-keys {path}"
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise OptionError(f"{given} cannot be read ({error.strerror})") from None
    if len(data) > MOST_BYTES:
        raise OptionError(f"{given} is over {MOST_BYTES >> 20} MiB; give a file of [[key]] tables")
    try:
        keys = msgspec.toml.decode(data, type=_File).key
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        form = '[[key]] with name = "ann" and key = "…" (docs/operate/security.md)'
        raise OptionError(f"{given}: {error}; it must hold {form}") from None
    if not keys:
        raise OptionError(f"{given} holds no key, so no client could use the server")
    if len(keys) > MOST_KEYS:
        raise OptionError(f"{given} holds {len(keys)} keys; at most {MOST_KEYS} are read")
    if path.stat().st_mode & 0o004 and any(key.key is not None for key in keys):
        log.warning("WARNING: everybody on this machine can read %s: chmod o= %s", path, path)
    seen: dict[str, str] = {}
    for key in keys:
        _check(key, given, seen)
    return keys


def _check(key: Key, given: str, seen: dict[str, str]) -> None:
    """One row; `seen`: the rows before it. Raises OptionError."""
    name = key.name
    if not name or not name.isprintable() or len(name) > 64:
        raise OptionError(f"{given}: a name is {name!r}; it must have 1 to 64 printable characters")
    if (key.key is None) == (key.sha256 is None):
        raise OptionError(f"{given}: key {name!r} must have either key or sha256")
    if key.key is not None and (not key.key.strip() or key.key != key.key.strip()):
        raise OptionError(f"{given}: key {name!r} is empty or has space around it")
    if key.sha256 is not None and not re.fullmatch(f"[0-9a-fA-F]{{{_HEX}}}", key.sha256):
        raise OptionError(f"{given}: sha256 of key {name!r} must be {_HEX} hexadecimal digits")
    _check_secret(key, given)
    if key.salt is not None and not 1 <= len(key.salt) <= MOST_SALT:
        words = f"it must have 1 to {MOST_SALT}"
        raise OptionError(f"{given}: salt of key {name!r} has {len(key.salt)} characters; {words}")
    for field in ("requests_per_minute", "tokens_per_minute", "max_requests"):
        value = getattr(key, field)
        if value is not None and not 1 <= value <= MOST_LIMIT:
            words = f"it must be at least 1 and at most {MOST_LIMIT} (leave it out for no limit)"
            raise OptionError(f"{given}: {field} of key {name!r} is {value}; {words}")
    digest = key.digest.hex()
    for what, row in (("name", name), ("secret", digest)):
        if row in seen:
            raise OptionError(f"{given}: keys {seen[row]!r} and {name!r} have the same {what}")
    seen[name] = seen[digest] = name


def _check_secret(key: Key, given: str) -> None:
    """Raises OptionError for a public key, and warns of one that may be guessed."""
    if key.digest.hex() in _SAMPLES:
        words = f"{given}: key {key.name!r} is one of our examples, which everybody knows"
        raise OptionError(f"{words}: make one of your own with `openssl rand -hex 16`")
    if key.key is not None and len(key.key) < SHORT:
        words = "WARNING: key %r has %d characters and may be guessed: openssl rand -hex 16"
        log.warning(words, key.name, len(key.key))
