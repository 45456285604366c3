"""The parts of a parsed answer."""

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    REASONING = "reasoning_content"
    CONTENT = "content"
    CALL = "tool_calls"


@dataclass(frozen=True)
class Delta:
    """A piece of the answer. A call starts with a `name`; the concatenated `text` of its deltas is
    its JSON arguments."""

    kind: Kind
    text: str
    name: str = ""


class Deltas:
    """Pending deltas; consecutive pieces of one part are joined."""

    def __init__(self) -> None:
        self._rows: list[tuple[Kind, str, list[str]]] = []  # kind, name, pieces

    def add(self, delta: Delta) -> None:
        if self._rows and not delta.name and self._rows[-1][0] is delta.kind:
            self._rows[-1][2].append(delta.text)
        else:
            self._rows.append((delta.kind, delta.name, [delta.text]))

    def take(self) -> list[Delta]:
        rows, self._rows = self._rows, []
        return [Delta(kind, "".join(texts), name) for kind, name, texts in rows]
