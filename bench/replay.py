"""Replays a recorded conversation with tools, turn by turn.

Knows the file: a JSON object with `messages` as /v1/chat/completions takes them, `tools` if any,
and other fields of each body (`chat_template_kwargs`). Each assistant message becomes a request
with all messages before it. A list of such objects is several conversations, used in turn. A
message may also have `max_tokens` (of an answer) and `pause_s` (before a tool's or a user's
message).
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from spark_engine.bench.load import Json, Turn
from spark_engine.errors import OptionError

OWN = ("max_tokens", "pause_s")  # fields of the file, which are not sent
CHARACTERS = 4  # bytes of a recorded answer per token, if its tokens were not recorded


def read(path: Path) -> list[Json]:
    """The conversations of a file. Raises OptionError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"--replay {path} cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        wanted = "an object with messages, or a list of such objects"
        raise OptionError(f"--replay {path} is no JSON ({error}): it must be {wanted}") from None
    rows = found if isinstance(found, list) else [found]
    for i, row in enumerate(rows):
        messages = row.get("messages") if isinstance(row, dict) else None
        good = isinstance(messages, list) and all(isinstance(m, dict) for m in messages)
        if not good or not any(m.get("role") == "assistant" for m in messages or ()):
            raise OptionError(f"--replay {path}: conversation {i} has no messages with an answer")
        for wrong in (*_wrong_tools(row), *map(_wrong, messages or ())):
            if wrong:
                raise OptionError(f"--replay {path}: conversation {i} has {wrong}")
    if not rows:
        raise OptionError(f"--replay {path} holds no conversation")
    return rows


def _wrong(message: Json) -> str:
    """The fault of a message, or ""."""
    content, most, pause = (message.get(name) for name in ("content", "max_tokens", "pause_s"))
    if not isinstance(content, str | list | None):
        return f"the content {content!r}; it must be text or a list of parts"
    if most is not None and not (type(most) is int and most > 0):
        return f"max_tokens of {most!r}; it must be 1 or more"
    number = isinstance(pause, int | float) and not isinstance(pause, bool)
    if pause is not None and not (number and 0 <= pause < math.inf):
        return f"pause_s of {pause!r}; it must be seconds"
    return ""


def _wrong_tools(row: Json) -> Iterator[str]:
    tools = row.get("tools") or []
    if not isinstance(tools, list):
        yield f"tools of {tools!r}; they must be a list"
    elif not all(isinstance(t, dict) and isinstance(t.get("function"), dict) for t in tools):
        yield "a tool without its function"


def turns(row: Json, mark: str, own_answers: bool) -> tuple[Turn, ...]:
    """The requests of one conversation.

    `mark` starts the prompt, so that the server's cache of another run does not match. With
    `own_answers` it continues with the server's answer, else with the recorded one.
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
            pause += message.get("pause_s") or 0.0
    return tuple(made)


def more(row: Json, mark: str) -> Json:
    """The fields of each body except the messages. Tools may precede them in the prompt, so they
    are marked too."""
    found = {key: value for key, value in row.items() if key != "messages"}
    if tools := found.get("tools"):
        function = tools[0]["function"]
        words = f"{mark} {function.get('description') or ''}".strip()
        first = {**tools[0], "function": {**function, "description": words}}
        found["tools"] = [first, *tools[1:]]
    return found


def _marked(messages: Sequence[Json], mark: str) -> list[Json]:
    first = messages[0]
    if first.get("role") == "system":
        content = first.get("content") or ""
        parts = [{"type": "text", "text": mark}, *content] if isinstance(content, list) else None
        return [{**first, "content": parts or f"{mark}\n{content}"}, *messages[1:]]
    return [{"role": "system", "content": mark}, *messages]


def _length(message: dict[str, Any]) -> int:
    """Estimated tokens of a recorded answer."""
    calls, content = json.dumps(message.get("tool_calls") or ""), message.get("content") or ""
    content = content if isinstance(content, str) else json.dumps(content)
    texts = (message.get("reasoning_content") or "", content, calls)
    return max(8, sum(map(len, texts)) // CHARACTERS)
