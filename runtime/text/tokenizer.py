"""Text to token ids and back, and a stream's detokeniser.

Knows byte-level BPE (the only kind of this model family) and the `tokenizers` library. Knows no
chat template, no stop strings and no engine.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from spark_engine.errors import EngineError, RequestError
from spark_engine.manifest import parse_json
from spark_engine.runtime.text.reply_formats import marks

MOST_BYTES = 128 << 20  # of a file: ten times the longest of a supported model
MOST_TOKENS = 1 << 20  # four times the largest vocabulary of a supported model


class Tokenizer:
    """The tokenizer of one engine. Thread-safe: immutable after construction."""

    def __init__(self, backend: Backend, special: frozenset[int]) -> None:
        self._backend = backend
        self.special = special
        size = backend.get_vocab_size(with_added_tokens=True)
        self._bytes = [_token_bytes(backend.id_to_token(i)) for i in range(size)]
        self.longest = max(map(len, self._bytes), default=0)  # bytes of a token
        known = ((backend.token_to_id(mark), mark) for mark in sorted(marks()))
        self.marks = {i: mark for i, mark in known if i is not None}  # of thoughts and calls
        self._spelled: dict[int, list[int]] = {}

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Reads `tokenizer.json`, and additions in `tokenizer_config.json`.

        Raises EngineError if a file is missing, damaged, or not byte-level BPE.
        """
        path = folder / "tokenizer.json"
        text = _read(path)
        settings = _json(path, text)
        if not _is_byte_level(settings.get("decoder")):
            raise EngineError(f"{path}: the decoder is not byte-level; only that kind is supported")
        model = settings.get("model")
        words = model.get("vocab") if isinstance(model, dict) else None
        _check_count(path, words, settings.get("added_tokens"))
        backend = _backend(path, text)
        # Settings of a training run would truncate or pad every prompt without a warning.
        backend.no_truncation()
        backend.no_padding()
        config = folder / "tokenizer_config.json"
        added = _json(config, _read(config)) if config.exists() else {}
        rows = added.get("added_tokens_decoder", {})
        _check_count(config, rows)
        try:
            _add_missing(backend, rows, config)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            words = f"{config}: added_tokens_decoder is malformed ({error!r})"
            raise EngineError(f"{words}; build the engine again") from None
        specials = (i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        return cls(backend, frozenset(specials))

    def __len__(self) -> int:
        return len(self._bytes)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; special tokens in the text become their ids.

        Raises RequestError if the text holds a lone surrogate (not encodable as UTF-8).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the text is not valid Unicode: {error}") from None
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        if self._spelled.keys().isdisjoint(ids):
            return ids
        return [one for token in ids for one in self._spelled.get(token, (token,))]

    def without(self, reserved: Iterable[int]) -> Tokenizer:
        """The same, but no text becomes the `reserved` tokens: their words are spelled with others,
        as if the first character were apart."""
        made = copy(self)
        words = {token: self.decode([token], skip_special=False) for token in reserved}
        made._spelled = {i: self.encode(w[:1]) + self.encode(w[1:]) for i, w in words.items()}
        return made

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of a whole sequence; invalid UTF-8 becomes U+FFFD."""
        detokenizer = Detokenizer(self, skip_special)
        return detokenizer.push(ids) + detokenizer.flush()

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token; empty for an id without a token."""
        return self._bytes[token] if 0 <= token < len(self._bytes) else b""

    def id_of(self, token: str) -> int | None:
        found: int | None = self._backend.token_to_id(token)
        return found


def need(tokenizer: Tokenizer | None) -> Tokenizer:
    """Raises RequestError where the engine has none."""
    if tokenizer is None:
        raise RequestError("this engine has no tokenizer; send token ids to /v1/completions")
    return tokenizer


class Detokenizer:
    """Converts the ids of one stream to text deltas that never split a character.

    The concatenated deltas and the flush equal `Tokenizer.decode` of all ids. Each token costs time
    proportional to its own bytes.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special if skip_special else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete."""
        table, skipped = self._tokenizer, self._skipped
        data = b"".join(table.token_bytes(i) for i in ids if i not in skipped)
        return self._decoder.decode(data)

    def flush(self) -> str:
        """The rest at the end: U+FFFD for an incomplete character."""
        return self._decoder.decode(b"", final=True)


def _byte_of_char() -> dict[str, int]:
    """The inverse of GPT-2's byte alphabet: printable Latin-1 maps to itself, every other byte to
    the next unused code point from U+0100 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = [b for b in range(256) if b not in own]
    return {chr(b): b for b in own} | {chr(0x100 + i): b for i, b in enumerate(other)}


_BYTE_OF_CHAR = _byte_of_char()


def _token_bytes(token: str | None) -> bytes:
    if token is None:
        return b""
    codes = [_BYTE_OF_CHAR.get(char) for char in token]
    known = [code for code in codes if code is not None]
    # a token outside the byte alphabet (an added one with a space, for example) is its own text
    return bytes(known) if len(known) == len(codes) else token.encode()


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders", [])
        return len(parts) == 1 and _is_byte_level(parts[0])
    return decoder.get("type") == "ByteLevel"


def _backend(path: Path, text: str) -> Backend:
    try:
        found = Backend.from_str(text)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exception, and panics
        words = f"{path} cannot be read ({str(error)[:500]})"
        raise EngineError(f"{words}; build the engine again") from None
    return found


def _check_count(path: Path, *lists: Any) -> None:
    """Before the library reads them: it takes some 500 bytes a token."""
    size = sum(len(one) for one in lists if isinstance(one, dict | list))
    if size > MOST_TOKENS:
        raise EngineError(f"{path} has {size} tokens; at most {MOST_TOKENS} are read")


def _add_missing(backend: Backend, rows: dict[str, Any], path: Path) -> None:
    """Adds tokens that only tokenizer_config.json lists, and checks their ids."""
    for number, row in sorted(rows.items(), key=lambda item: int(item[0])):
        if backend.token_to_id(row["content"]) is None:
            token = AddedToken(row["content"], special=row.get("special", False), normalized=False)
            backend.add_tokens([token])
        if (got := backend.token_to_id(row["content"])) != int(number):
            raise EngineError(f"{path}: token {row['content']!r} has id {got}, not {number}")


def _read(path: Path) -> str:
    try:
        if (size := path.stat().st_size) > MOST_BYTES:
            raise EngineError(f"{path} has {size} bytes; at most {MOST_BYTES} are read")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise EngineError(f"{path} is missing: this engine has no tokenizer") from None
    except (OSError, UnicodeDecodeError) as error:
        raise EngineError(f"{path} cannot be read: {error}") from None


def _json(path: Path, text: str) -> dict[str, Any]:
    return parse_json(text, str(path), "build the engine again")
