"""Keys: the file, the limits of each, and what is kept when the file is read again."""

import hashlib
import logging
from pathlib import Path

import pytest

from spark_engine.errors import OptionError
from spark_engine.runtime.server.operation import keys as module
from spark_engine.runtime.server.operation.keys import Keyring, LimitReached, Unauthorised

ANN, BOB = "ann's clé".encode(), b"bob's"
DIGEST = hashlib.sha256(BOB).hexdigest()
BOTH = f"""
[[key]]
name = "ann"
key = "ann's clé"
requests_per_minute = 2
tokens_per_minute = 60
max_requests = 3
salt = "team a"

[[key]]
name = "bob"
sha256 = "{DIGEST}"
"""


def _write(folder: Path, text: str) -> Path:
    path = folder / "keys.toml"
    path.write_text(text)
    path.chmod(0o600)
    return path


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ring(tmp_path: Path, clock: Clock) -> Keyring:
    return Keyring(_write(tmp_path, BOTH), "single", clock)


def test_a_key_is_known_by_itself_or_by_its_digest(ring: Keyring) -> None:
    assert ring.locked and not Keyring().locked
    assert [ring.find(secret).key.salt for secret in (ANN, BOB)] == ["team a", None]
    names = [ring.find(secret).key.name for secret in (ANN, BOB, b"single")]
    assert names == ["ann", "bob", "api-key"]
    for wrong in ("", "ann's cl", "ann's cléx", "bob's ", DIGEST, "ANN'S CLÉ", "singl"):
        with pytest.raises(Unauthorised, match="missing or wrong"):
            ring.find(wrong.encode())


def test_every_key_is_compared_whole(ring: Keyring, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time depends neither on the key nor on the number of its right characters."""
    compared: list[tuple[int, int]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return a == b

    monkeypatch.setattr(module.hmac, "compare_digest", compare)
    ring.find(ANN)
    assert compared == [(32, 32)] * 3


def test_requests_a_minute(ring: Keyring, clock: Clock) -> None:
    ann = ring.find(ANN)
    for _ in range(2):
        ann.enter()
        ann.leave()
    with pytest.raises(LimitReached, match="'ann' has used its 2 requests a minute; retry in 30 s"):
        ann.enter()
    clock.now += 29
    with pytest.raises(LimitReached) as caught:
        ann.enter()
    assert caught.value.kind == "requests" and caught.value.retry_s == pytest.approx(1)
    assert ann.open == 0, "a refused request does not count"
    clock.now += 1
    ann.enter()
    ann.leave()
    clock.now += 1000
    for _ in range(2):  # no more than a minute's accumulate
        ann.enter()
        ann.leave()
    with pytest.raises(LimitReached, match="2 requests a minute"):
        ann.enter()


def test_tokens_may_be_overdrawn_and_are_waited_for(ring: Keyring, clock: Clock) -> None:
    ann = ring.find(ANN)
    ann.enter()
    ann.charge(100)  # 60 were there
    with pytest.raises(LimitReached, match="its 60 tokens a minute; retry in 41 s") as caught:
        ann.enter()
    assert caught.value.kind == "tokens"
    clock.now += 41
    ann.enter()


def test_requests_at_a_time(ring: Keyring, clock: Clock) -> None:
    ann, bob = ring.find(ANN), ring.find(BOB)
    for _ in range(3):
        clock.now += 60
        ann.enter()
    clock.now += 60
    with pytest.raises(LimitReached, match=r"3 open requests \(at most 3\)") as caught:
        ann.enter()
    assert caught.value.kind == "at_once"
    ann.leave()
    ann.enter()
    for _ in range(1000):
        bob.enter()
        bob.charge(10**6)


def test_what_was_used_outlives_a_reload(ring: Keyring, clock: Clock) -> None:
    assert ring.path is not None
    ann = ring.find(ANN)
    ann.enter()
    ann.charge(59)
    text = BOTH.replace("ann's clé", "new").replace("requests_per_minute = 2", "")
    ring.path.write_text(text.replace("= 60", "= 30"))
    assert ring.reload()
    with pytest.raises(Unauthorised):
        ring.find(ANN)
    assert ring.find(b"new") is ann and ann.open == 1
    ann.enter()
    ann.charge(31)
    with pytest.raises(LimitReached, match="30 tokens a minute; retry in 62 s"):
        ann.enter()


def test_a_key_that_left_the_file_is_gone(ring: Keyring) -> None:
    assert ring.path is not None
    ring.path.write_text('[[key]]\nname = "eve"\nkey = "e"\n')
    assert ring.reload() and set(ring.accounts) == {"eve", "api-key"}


def test_a_broken_file_leaves_the_keys_as_they_were(
    ring: Keyring, caplog: pytest.LogCaptureFixture
) -> None:
    assert ring.path is not None
    ring.path.write_text(BOTH + "[[key]")
    with caplog.at_level(logging.INFO):
        assert not ring.reload()
    assert "the keys stay as they were" in caplog.text
    assert ring.find(BOB).key.name == "bob"


SECRET = hashlib.sha256(b"secret").hexdigest()
ROW = '[[key]]\nname = "a"\nkey = "k"\n'
WRONG = [
    ("", "missing required field `key`"),
    ("key = []", "holds no key"),
    ("[[key]]\nname = 3", "Expected `str`, got `int` - at `$.key[0].name`"),
    (ROW + "rate = 3", "unknown field `rate` - at `$.key[0]`"),
    (ROW + 'sha256 = "00"', "'a' must have either key or sha256"),
    ('[[key]]\nname = "a"', "'a' must have either key or sha256"),
    ('[[key]]\nname = "a"\nkey = " k"', "'a' is empty or has space around it"),
    ('[[key]]\nname = "a"\nkey = ""', "'a' is empty or has space around it"),
    ('[[key]]\nname = "a"\nsha256 = "xyz"', "'a' must be 64 hexadecimal digits"),
    ('[[key]]\nname = ""\nkey = "k"', "1 to 64 printable characters"),
    ('[[key]]\nname = "a\\nb"\nkey = "k"', "1 to 64 printable characters"),
    (ROW + "max_requests = 0", "max_requests of key 'a' is 0"),
    (ROW + "tokens_per_minute = -1", "tokens_per_minute of key 'a' is -1"),
    (ROW + ROW.replace('"k"', '"l"'), "'a' and 'a' have the same name"),
    (ROW + ROW.replace('"a"', '"b"'), "'a' and 'b' have the same secret"),
    ("[[key", "it must hold [[key]]"),
    *(
        (ROW + f'salt = "{salt}"', f"salt of key 'a' has {len(salt)} ch")
        for salt in ("", "a" * 257)
    ),
    (ROW + "max_requests = " + "1" * 5_000_000, "it must hold [[key]]"),
    (ROW + f"max_requests = {10**13}", "max_requests of key 'a' is 10000000000000; it must be"),
    ("key = " + "[" * 100_000, "it must hold [[key]]"),
    (ROW.replace('"k"', '"replace-me-with-32-random-characters"'), "is one of our examples"),
    (ROW.replace('"k"', '"secret"'), "is one of our examples"),
    (f'[[key]]\nname = "a"\nsha256 = "{SECRET}"', "is one of our examples"),
    (f'[[key]]\nname = "a"\nsha256 = "{SECRET.upper()}"', "is one of our examples"),
]


@pytest.mark.parametrize(("text", "words"), WRONG)
def test_a_wrong_file_is_refused_in_words(tmp_path: Path, text: str, words: str) -> None:
    path = _write(tmp_path, text)
    with pytest.raises(OptionError) as caught:
        Keyring(path)
    assert words in str(caught.value) and str(path) in str(caught.value)


def test_a_missing_file_and_a_name_that_is_taken(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be read .No such file"):
        Keyring(tmp_path / "none")
    path = _write(tmp_path, ROW.replace('"a"', '"api-key"'))
    with pytest.raises(OptionError, match="rename it"):
        Keyring(path, "single")


def test_a_file_for_all_to_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = _write(tmp_path, ROW.replace('"k"', f'"{32 * "k"}"'))
    Keyring(path)
    assert not caplog.text
    path.chmod(0o644)
    Keyring(path)
    assert "chmod o=" in caplog.text


@pytest.mark.parametrize("single", ["", " ", " k", "k\n"])
def test_an_empty_key_admits_no_request(single: str) -> None:
    """A request without a key brings an empty one."""
    with pytest.raises(OptionError, match="--api-key is empty"):
        Keyring(single=single)


def test_the_number_of_keys_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = "".join(f'[[key]]\nname = "{i}"\nkey = "{i:032}"\n' for i in range(3))
    path = _write(tmp_path, rows)
    assert len(Keyring(path).accounts) == 3
    monkeypatch.setattr(module, "MOST_KEYS", 2)
    with pytest.raises(OptionError, match="holds 3 keys; at most 2"):
        Keyring(path)
    monkeypatch.setattr(module, "MOST_BYTES", 100)
    with pytest.raises(OptionError, match="is over"):
        Keyring(path)


def test_a_key_that_may_be_guessed_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Keyring(_write(tmp_path, ROW.replace('"k"', f'"{15 * "k"}"')), "s" * 16)
    assert "key 'a' has 15 characters" in caplog.text and "kkk" not in caplog.text
    assert "api-key" not in caplog.text
    Keyring(single="short")
    assert "key 'api-key' has 5 characters" in caplog.text
    for sample in ("secret", "replace-me-with-32-random-characters"):
        with pytest.raises(OptionError, match="--api-key: key 'api-key' is one of our examples"):
            Keyring(single=sample)
