"""The items of a stored conversation: JSON in which each item is found without decoding it.

Knows the fields of OpenAI's items; knows no store and no HTTP. The expensive work is done where
items are made, which may be in a thread or another process.
"""

import re
import secrets
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from spark_engine.runtime.server.api.answers import Json, Part
from spark_engine.runtime.server.api.fields import BadField
from spark_engine.runtime.text.image_parts import find_images

MOST_ITEMS = 1 << 16  # of one conversation
MOST_IMAGED = 16 << 20  # bytes of a conversation with images
NOT_KEPT = "[an image that is no longer stored]"
_CALL = ("call_id", "name", "namespace", "status")
# fields of known items; of others all fields are stored
FIELDS: dict[str, tuple[str, ...]] = {
    "message": ("role", "content", "status", "phase"),
    "reasoning": ("summary", "content", "encrypted_content", "status"),
    "function_call": (*_CALL, "arguments"),
    "function_call_output": (*_CALL, "output"),
    "custom_tool_call": (*_CALL, "input"),
    "custom_tool_call_output": (*_CALL, "output"),
}
_PARTS = ("content", "summary", "output")  # fields that are a text, or a list of parts
_OF_PART = ("type", "text", "refusal", "image_url", "detail", "file_id", "filename", "file_data")
_PREFIX = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
_KNOWN = re.compile(r"[\w.:-]{1,128}", re.ASCII)  # ids that are stored unchanged
_HEAD = re.compile(rb'\{"id":"([^"]*)"')


@dataclass(frozen=True)
class StoredItems:
    """Items as JSON with a comma after each; `ends[i]` is the offset at which item i ends."""

    data: bytes
    ends: Sequence[int]

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.data) + 8 * len(self.ends)

    @property
    def parts(self) -> Sequence[Part]:
        """All of them, as the parts of a JSON list, without a copy."""
        return b"[", memoryview(self.data)[:-1], b"]"

    def page(self, limit: int, after: str | None, ascending: bool) -> list[Part]:
        """At most `limit` items after the one with the id `after`, as the parts of OpenAI's list,
        without a copy. Raises BadField where that id does not exist."""
        rows = range(len(self.ends)) if ascending else range(len(self.ends) - 1, -1, -1)
        begin = 0 if after is None else rows.index(self._index(after)) + 1
        shown = rows[begin : begin + limit]
        more = b"true" if begin + limit < len(rows) else b"false"
        parts: list[Part] = [b'{"object":"list","data":[']
        for i in shown:
            parts += [b"," if len(parts) > 1 else b"", self._item(i)]
        ends = b""
        if shown:
            ids = self._id_of(shown[0]), self._id_of(shown[-1])
            ends = b',"first_id":"%b","last_id":"%b"' % ids
        return [*parts, b'],"has_more":%b%b}' % (more, ends)]

    def _begin(self, i: int) -> int:
        return self.ends[i - 1] if i else 0

    def _item(self, i: int) -> memoryview:
        return memoryview(self.data)[self._begin(i) : self.ends[i] - 1]

    def _id_of(self, i: int) -> bytes:
        found = _HEAD.match(self.data, self._begin(i))
        assert found is not None, "every item begins with its id"
        return found[1]

    def _index(self, ident: str) -> int:
        words = f"after is {ident[:80]!r}, which is the id of no item"
        if not _KNOWN.fullmatch(ident):
            raise BadField(words, "after")
        begin, at = b'{"id":"%b"' % ident.encode(), -1
        while (at := self.data.find(begin, at + 1)) >= 0:
            i = bisect_right(self.ends, at)
            if at == self._begin(i):  # not within an item
                return i
        raise BadField(words, "after")


def store_items(items: Sequence[Json]) -> StoredItems:
    """Items as they are stored: each with an id, and known types without unknown fields.
    Of a conversation over MOST_IMAGED bytes the oldest images become notes. Raises BadField for
    too many."""
    if len(items) > MOST_ITEMS:
        raise BadField(f"the input has {len(items)} items; at most {MOST_ITEMS} are read", "input")
    name, encode = secrets.token_hex(12), msgspec.json.Encoder().encode
    parts = [encode(_kept(item, f"{name}{i:x}")) for i, item in enumerate(items)]
    over = sum(map(len, parts)) - MOST_IMAGED
    for i, part in enumerate(parts):
        if over <= 0:
            break
        if found := find_images([row := msgspec.json.decode(part)], "input"):
            for one in found:
                one.replace(NOT_KEPT)
            parts[i] = encode(row)
            over -= len(part) - len(parts[i])
    ends, at = array("Q"), 0
    for part in parts:
        at += len(part) + 1
        ends.append(at)
    return StoredItems(b"".join(part + b"," for part in parts), ends)


def _kept(item: Json, name: str) -> Json:
    kind = item.get("type") or ("message" if "role" in item else None)
    given = item.get("id")
    known = isinstance(given, str) and _KNOWN.fullmatch(given)
    prefix = _PREFIX.get(kind, "item") if isinstance(kind, str) else "item"
    row: Json = {"id": given if known else f"{prefix}_{name}"}
    if not isinstance(kind, str) or kind not in FIELDS:
        return row | {key: value for key, value in item.items() if key != "id"}
    row["type"] = kind
    for key in FIELDS[kind]:
        if key in item:
            value = item[key]
            row[key] = _parts(value) if key in _PARTS else value
    return row


def _parts(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return [_part(part) if isinstance(part, dict) else part for part in value]


def _part(part: Json) -> Json:
    row = {key: part[key] for key in _OF_PART if key in part}
    return row | {"annotations": []} if part.get("type") == "output_text" else row
