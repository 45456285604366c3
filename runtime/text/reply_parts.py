"""What an answer is made of, as it is passed on."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    """What a delta is."""

    REASONING = "reasoning_content"
    CONTENT = "content"
    CALL = "tool_calls"


@dataclass(frozen=True)
class Delta:
    """A piece of the answer. A call begins with a `name`; the `text` of its deltas, one after the
    other, is its JSON arguments."""

    kind: Kind
    text: str
    name: str = ""
