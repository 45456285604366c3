"""The images of a conversation: their parts, in any API's format, and marks that represent them.

A mark is text, so it passes through the translation between APIs, the normalising of messages and
the chat template as the client's text does. Knows part types; knows no pixels and no tokens.
"""

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spark_engine.runtime.text.parts import has_text, is_content, is_image, is_video, kind_of

_DEPTH = 4  # nesting of parts, as in `parts`
_NOT_USERS = ("assistant", "tool", "function")  # roles
_TEXTS = ("text", "input_text")
_OF_RESULTS = (*_TEXTS, "image", "image_url", "input_image", "audio", "resource", "resource_link")


@dataclass(frozen=True)
class ImagePart:
    """An image or a video: `part` is `holder[key]` and `place` its path in the body.

    `new`: the user sends it now; it is in the last message and in no tool's result.
    """

    holder: Any
    key: int | str
    part: Mapping[str, Any]
    place: str
    new: bool

    @property
    def video(self) -> bool:
        return not is_image(self.part)

    def replace(self, text: str) -> None:
        self.holder[self.key] = {"type": "input_text", "text": text}

    def source(self) -> tuple[str, Any, bool]:
        """(path, value, whether it is base64 without a header) of the image's URL or data."""
        part, place = self.part, self.place
        url, source = part.get("image_url"), part.get("source")
        if isinstance(url, Mapping):
            return f"{place}.image_url.url", url.get("url"), False
        if url is None and isinstance(source, Mapping):
            known = {"base64": "data", "url": "url", "file": "file_id"}
            name = known.get(str(source.get("type")), "type")
            return f"{place}.source.{name}", source.get(name), name == "data"
        names = ("image", "url", "data", "file_id") if url is None else ()
        name = next((name for name in names if part.get(name) is not None), "image_url")
        return f"{place}.{name}", part.get(name), name == "data"

    def detail(self) -> Any:
        inner = self.part.get("image_url")
        found = inner.get("detail") if isinstance(inner, Mapping) else None
        return self.part.get("detail") if found is None else found


def find_images(
    messages: Sequence[Mapping[str, Any]], field: str, shift: int = 0
) -> list[ImagePart]:
    """The images and videos of messages, or of the items of /v1/responses, in their order.
    `field[i + shift]` is the place of message i."""
    found: list[ImagePart] = []
    for i, message in enumerate(messages):
        role = message.get("role")
        new = i == len(messages) - 1 and isinstance(role, str) and role not in _NOT_USERS
        kind = kind_of(message)
        key = "output" if kind == "mcp_call" or kind.endswith("_output") else "content"
        if key == "output" or role in _NOT_USERS[1:]:
            _unpack(message, key)
        found += _of_content(message, key, f"{field}[{i + shift}].{key}", new, _DEPTH)
    return found


def _unpack(holder: Any, key: str) -> None:
    """Replaces texts of a tool's result that are the JSON of parts with an image by these: many
    clients send the results of MCP servers so. Other JSON is the tool's text."""
    content = holder.get(key)
    if isinstance(content, str) and (parts := _parts_of(content)):
        holder[key] = parts
    elif isinstance(content, list):
        for i, part in enumerate(content):
            text = part.get("text") if kind_of(part) in _TEXTS else None
            if isinstance(text, str) and (parts := _parts_of(text)):
                content[i] = {"type": "content", "content": parts}
            elif kind_of(part) == "resource":
                content[i] = _resource(part)


def _parts_of(text: str) -> list[Any]:
    """The parts of a result, a list of them or one of them in JSON; none if no part has the data
    of an image."""
    if text.lstrip()[:1] not in ("[", "{") or "image" not in text:
        return []
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    if isinstance(value, dict) and "type" not in value:
        value = value.get("content")
    parts = [_resource(part) for part in (value if isinstance(value, list) else [value])]
    known = all(kind_of(part) in _OF_RESULTS for part in parts)
    return parts if known and any(map(_has_data, parts)) else []


def _resource(part: Any) -> Any:
    """A part; the image that it embeds, if it does."""
    inner = part.get("resource") if kind_of(part) == "resource" else None
    if not isinstance(inner, dict) or not str(inner.get("mimeType")).startswith("image/"):
        return part
    return {"type": "image", "data": inner.get("blob")}


def _has_data(part: dict[str, Any]) -> bool:
    _, value, plain = ImagePart(None, "", part, "", False).source()
    data = isinstance(value, str) and (plain or value[:11].lower() == "data:image/")
    return data and is_image(part)


def _of_content(holder: Any, key: str, place: str, new: bool, depth: int) -> Iterator[ImagePart]:
    content = holder.get(key)
    if isinstance(content, list):
        for i in range(len(content)):
            yield from _of_part(content, i, f"{place}[{i}]", new, depth)
    elif is_content(content):
        yield from _of_part(holder, key, place, new, depth)


def _of_part(holder: Any, key: Any, place: str, new: bool, depth: int) -> Iterator[ImagePart]:
    part = holder[key]
    if not isinstance(part, dict) or has_text(part):
        return
    if is_image(part) or is_video(part):
        yield ImagePart(holder, key, part, place, new)
    elif depth:
        if kind_of(part).endswith("_result"):
            _unpack(part, "content")
        source, new = part.get("source"), new and not kind_of(part).endswith("_result")
        inner, path = (source, f"{place}.source") if isinstance(source, dict) else (part, place)
        yield from _of_content(inner, "content", f"{path}.content", new, depth - 1)


class Marks:
    """The texts that represent the images of one request. No client can write one.

    A mark has a beginning and an end, so that what a template writes for an image is between them.
    """

    def __init__(self) -> None:
        name = secrets.token_hex(8)
        self._begin, self._end = f"<{name}:{{}}>", f"</{name}>"
        self._mark = re.compile(f"<{name}:([0-9]+)>(.*?)</{name}>", re.DOTALL)

    def of(self, number: int) -> str:
        return self._begin.format(number) + self._end

    def parts(self, text: str) -> str | list[dict[str, str]]:
        """A message's content for a template that writes images: parts, if it has marks."""
        first, *others = text.split(self._end)
        parts = [{"type": "text", "text": first}]
        for after in others:
            parts += [{"type": "image"}, {"type": "text", "text": self._end + after}]
        return parts if others else text

    def split(self, text: str) -> list[str]:
        """A text, then for each mark its number, what is inside of it, and the text after it."""
        return self._mark.split(text)
