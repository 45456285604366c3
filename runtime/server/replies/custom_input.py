"""The text of a custom tool's input, taken out of the JSON arguments of its function."""

import json
import re

from pydantic_core import from_json

from spark_engine.runtime.server.api.responses_tools import INPUT

_HEAD = re.compile(rf'\s*{{\s*"{INPUT}"\s*:\s*"')
_LONGEST_HEAD = 64  # characters within which a head begins its text, if it is one
# whole characters of a JSON string: plain ones, escapes, both halves of an escaped pair
_WHOLE = re.compile(
    r'(?:[^"\\]|\\[^u]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}'
    r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4})*"
)


class CustomInput:
    """One call's input. Arguments that do not start with a text `input` are returned at the end:
    their only text, or else the JSON itself."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._rest = ""  # JSON that was not read yet, after `_held`
        self._held: list[str] = []  # JSON that has no such head
        self._head: bool | None = None  # whether it has one; None: not known yet
        self._ended = False

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def push(self, more: str) -> str:
        """The input in these characters of the arguments."""
        if self._ended:
            return ""
        self._rest += more
        if self._head is None:
            if (found := _HEAD.match(self._rest)) is not None:
                self._head, self._rest = True, self._rest[found.end() :]
            elif len(self._rest) > _LONGEST_HEAD:
                self._head = False
        if self._head:
            return self._add(self._take())
        if self._head is False:
            self._held.append(self._rest)
            self._rest = ""
        return ""

    def end(self) -> str:
        """The rest of it; the arguments have ended, or were cut off."""
        if self._head or self._ended:
            return ""
        self._ended = True
        return self._add(_only_text("".join([*self._held, self._rest])))

    def _add(self, text: str) -> str:
        self._texts.append(text)
        return text

    def _take(self) -> str:
        found = _WHOLE.match(self._rest)
        assert found is not None  # it may be empty
        end = found.end()
        self._ended = self._rest[end : end + 1] == '"'
        raw, self._rest = self._rest[:end], self._rest[end:]
        text: str = json.loads(f'"{raw}"', strict=False)
        return text


def _only_text(arguments: str) -> str:
    try:
        value = from_json(arguments, allow_partial="trailing-strings") if arguments else ""
    except ValueError:
        return arguments
    if isinstance(value, dict):
        texts = [value[INPUT]] if INPUT in value else list(value.values())
        if not texts:
            return ""
        if len(texts) == 1 and isinstance(texts[0], str):
            return texts[0]
    return value if isinstance(value, str) else arguments
