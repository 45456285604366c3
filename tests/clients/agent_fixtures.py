"""Makes fixtures of what agents asked: the last turn, and requests outside the turns, shortened.

The last turn has the whole conversation: calls, results and the image. Texts and descriptions are
cut, and what names a machine, a person or a session is replaced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.clients.agent_proxy import APIS, REPLY, Exchange
from tests.repository import ROOT

FIXTURES = ROOT / "tests" / "runtime" / "server" / "api" / "agents"
_TEXT, _NOTE = 160, 40  # characters of a text, and of a description
_IMAGE = re.compile(r"^(data:image/|iVBORw0KGgo)")  # kept whole
_SCHEMAS = ("parameters", "input_schema")  # kept without what explains them
_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_IDENT = re.compile(rf"{_UUID}|(?<![0-9A-Za-z])[0-9a-f]{{24,}}\b")


def write_fixture(name: str, version: str, seen: Sequence[Exchange], folder: Path) -> None:
    """Writes `FIXTURES/NAME.json`. `folder` is where the agent ran, which is replaced."""
    asked = [x for x in seen if x.path.partition("?")[0] in APIS and x.step in ("", REPLY)]
    short = Shortener({str(folder): "/user"})
    rows = [{"path": x.path, "step": x.step, "body": short(x.asked)} for x in asked]
    FIXTURES.mkdir(exist_ok=True)
    text = json.dumps({"agent": name, "version": version, "requests": rows}, indent=1)
    (FIXTURES / f"{name}.json").write_text(text + "\n")


class Shortener:
    """Shortens JSON and keeps its form. An identifier becomes a number, each time the same."""

    def __init__(self, words: dict[str, str]) -> None:
        """`words` are replaced."""
        self._words = words
        self._idents: dict[str, str] = {}

    def __call__(self, value: Any, most: int = _TEXT) -> Any:
        """The same in form, with texts of up to `most` characters."""
        if isinstance(value, str):
            return self._text(value, most)
        if isinstance(value, list):
            return [self(one, most) for one in value]
        if isinstance(value, dict):
            lengths = {"description": _NOTE, "encrypted_content": len(str(value))}
            return {
                key: self(_bare(one) if key in _SCHEMAS else one, lengths.get(key, most))
                for key, one in value.items()
            }
        return value

    def _text(self, text: str, most: int) -> str:
        if _IMAGE.match(text):
            return text
        for word, other in self._words.items():
            text = text.replace(word, other)
        text = _IDENT.sub(lambda found: self._number(found[0]), text)
        return text if len(text) <= most else f"{text[:most]} …"

    def _number(self, ident: str) -> str:
        return self._idents.setdefault(ident, f"{len(self._idents) + 1:024d}")


def _bare(schema: Any) -> Any:
    """A schema without descriptions; a property may have that name."""
    if isinstance(schema, list):
        return [_bare(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    words = isinstance(schema.get("description"), str)
    return {key: _bare(one) for key, one in schema.items() if key != "description" or not words}
