"""Request bodies: decoding, and errors that name the field.

Knows JSON, types and ranges. Knows no API: the bodies are in the files next to this one.
"""

import contextlib
import math
import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import msgspec

from spark_engine.errors import RequestError
from spark_engine.runtime.text.parts import short as short

_SHOWN = 1000  # bytes of a field's JSON above which an error shows it undecoded
# escapes one after the other: a whole pair of surrogates, a half of one (which is kept), any other
_ESCAPES = re.compile(rb"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(\\u[dD][89a-fA-F]..)|\\.", re.DOTALL)
_PATH = re.compile(r" - at `\$\.?([A-Za-z_]*)(.*)`$")


class BadField(RequestError):
    """A request is malformed."""


class UnknownModel(BadField):
    """The request names a model that is not served here."""

    status = 404


def unknown_model(name: str, names: Sequence[str]) -> UnknownModel:
    words = f"model {short(name)} is not served here; there is {', '.join(names)}"
    return UnknownModel(words, "model", "model_not_found")


def too_long(shown: str, most: int, param: str = "prompt") -> BadField:
    """The error of a prompt that does not fit. `shown`: its length; `most`: the context length.

    Clients detect this error by its first words, and shorten the conversation or switch models.
    """
    words = f"prompt is too long: {shown}; this model's maximum context length is {most} tokens"
    what = "shorten the conversation or start a new one"
    how = f"{what}, or build the engine for longer ones (spark-build --max-context)"
    return BadField(f"{words}, one of them new: {how}", param, "context_length_exceeded")


T = TypeVar("T")


def decode(data: bytes, kind: type[T], halves: bool = False) -> T:
    """One request body. Raises BadField naming the field, its value and what was expected.

    `halves`: half of a surrogate pair is read as U+FFFD, since clients that cut texts in the middle
    of a character store it in their history; else it is refused.

    Unknown fields are skipped without building them. Some deviations of clients are accepted: 64.0
    or "64" for an integer, "true" for a boolean, a byte order mark before the body.
    """
    data = data.removeprefix(BOM_UTF8)
    try:
        return msgspec.json.decode(data, type=kind, strict=False)
    except msgspec.ValidationError as error:
        raise _explain(str(error), data) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        half = next((m[1] for m in _ESCAPES.finditer(data) if m[1]), None)
        if half is not None and halves:
            return decode(_ESCAPES.sub(_whole, data), kind)
        if half is not None:
            shown = half.decode("ascii", "replace")
            words = f"the body holds {shown}, one half of a character: send both, or \\ufffd for it"
            raise BadField(words, code="invalid_json") from None
        raise BadField(f"the body is not valid JSON: {error}", code="invalid_json") from None


class ModelField(msgspec.Struct):
    """The model that a body of any API names."""

    model: str | None = None

    @classmethod
    def of(cls, body: bytes) -> "ModelField":
        """Raises BadField."""
        return decode(body, cls, halves=True)


def _whole(found: re.Match[bytes]) -> bytes:
    return b"\\ufffd" if found[1] else found[0]


@contextlib.contextmanager
def renamed(names: Mapping[str, str], places: Mapping[str, str] | None = None) -> Iterator[None]:
    """Errors in the block name a body's own fields; `names` maps from those of a `ChatRequest`.
    `places` maps regexes of the start of an error to the body's own field."""
    try:
        yield
    except RequestError as error:
        param = getattr(error, "param", None)
        own = names.get(param or "", param)
        words = str(error)
        for place, its in (places or {}).items():
            words = re.sub(f"^{place}", its, words)
        if param and own and words == str(error):
            words = words.replace(param, own, 1)
        if own is None or (own == param and words == str(error)):
            raise
        raise BadField(words, own, getattr(error, "code", None)) from None


def check_range(name: str, value: Any, low: float | None, high: float | None) -> None:
    """Raises BadField where a number is not from `low` to `high`; None means no limit."""
    if value is None:
        return
    above = low is None or value >= low
    below = high is None or value <= high
    # an integer may have any number of digits: it is compared, never converted to float
    finite = isinstance(value, int) or math.isfinite(value)
    if not (finite and above and below):
        span = f"at least {low}" if high is None else f"from {low} to {high}"
        raise BadField(f"{name} is {short(value)}; it must be {span}", name)


def check_type(body: msgspec.Struct, name: str) -> None:
    """Raises BadField where a field holds a value that its type does not allow."""
    value = getattr(body, name)
    try:
        msgspec.convert(value, _types(type(body))[name])
    except msgspec.ValidationError as error:
        words = str(error).replace("`", "")
        raise BadField(f"{name} is {short(value)}; it is not right: {words}", name) from None


@cache
def _types(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {row.name: row.type for row in msgspec.structs.fields(kind)}


def is_id(value: Any) -> bool:
    """True if the value may be a token id: an integer and not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def _explain(message: str, data: bytes) -> BadField:
    """msgspec's message, with the field's name and value."""
    found = _PATH.search(message)
    text = _PATH.sub("", message).replace("`", "")
    if found is None or not found[1]:
        missing = re.search(r"required field (\w+)", text)
        if missing is None:
            text = f"the body must be a JSON object: {text}"
        return BadField(text, missing[1] if missing else None)
    name = found[1]
    words = f"{name}{found[2]} is not right: {text}; {name} is {_field(data, name)}"
    return BadField(words, name)


def _field(data: bytes, name: str) -> str:
    """One field of a body for an error. A long one is cut without decoding it."""
    try:
        raw = bytes(msgspec.json.decode(data, type=dict[str, msgspec.Raw])[name])
        whole = msgspec.json.decode(raw) if len(raw) <= _SHOWN else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "unreadable"
    return short(whole) if len(raw) <= _SHOWN else f"{raw[:77].decode(errors='replace')}..."
