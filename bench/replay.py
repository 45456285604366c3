"""A recorded conversation with tools, asked again turn by turn.

Knows the file: a JSON object with `messages` as /v1/chat/completions takes them, `tools` if there
are any, and what else goes into each body (`chat_template_kwargs`). Each assistant message in it is
a request of all before it. A list of such objects is several conversations, taken in turn. Beside
a message may stand `max_tokens`, of an answer, and `pause_s`, of what follows a tool or a person.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spark_engine.bench.load import Json, Turn
from spark_engine.errors import OptionError

OWN = ("max_tokens", "pause_s")  # ours, not the server's
CHARACTERS = 4  # of a recorded answer for a token, where its tokens were not recorded


def read(path: Path) -> list[Json]:
    """The conversations of a file. Raises OptionError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"--replay {path} cannot be read: {error}") from None
    rows = found if isinstance(found, list) else [found]
    for i, row in enumerate(rows):
        messages = row.get("messages") if isinstance(row, dict) else None
        good = isinstance(messages, list) and all(isinstance(m, dict) for m in messages)
        if not good or not any(m.get("role") == "assistant" for m in messages or ()):
            raise OptionError(f"--replay {path}: conversation {i} has no messages with an answer")
    if not rows:
        raise OptionError(f"--replay {path} holds no conversation")
    return rows


def turns(row: Json, mark: str, own_answers: bool) -> tuple[Turn, ...]:
    """The requests of one conversation.

    `mark` is put at the very beginning, so that what a server keeps of another run is of no use.
    With `own_answers` the conversation goes on with what was answered, else with what was recorded.
    """
    made: list[Turn] = []
    new: list[Json] = []
    pause = 0.0
    for message in _marked(row["messages"], mark):
        plain = {k: v for k, v in message.items() if k not in OWN}
        if message.get("role") == "assistant":
            answer = None if own_answers else [plain]
            made.append(Turn(new, message.get("max_tokens") or _length(plain), answer, pause))
            new, pause = [], 0.0
        else:
            new.append(plain)
            pause += message.get("pause_s", 0.0)
    return tuple(made)


def more(row: Json, mark: str) -> Json:
    """What goes into each body beside the messages; tools, which may come first, are marked too."""
    found = {key: value for key, value in row.items() if key != "messages"}
    if tools := found.get("tools"):
        function = tools[0]["function"]
        words = f"{mark} {function.get('description', '')}".strip()
        first = {**tools[0], "function": {**function, "description": words}}
        found["tools"] = [first, *tools[1:]]
    return found


def _marked(messages: Sequence[Json], mark: str) -> list[Json]:
    first = messages[0]
    if first.get("role") == "system":
        return [{**first, "content": f"{mark}\n{first['content']}"}, *messages[1:]]
    return [{"role": "system", "content": mark}, *messages]


def _length(message: dict[str, Any]) -> int:
    """Tokens of a recorded answer, roughly."""
    calls = json.dumps(message.get("tool_calls") or "")
    texts = (message.get("reasoning_content") or "", message.get("content") or "", calls)
    return max(8, sum(map(len, texts)) // CHARACTERS)
