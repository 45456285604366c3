"""Texts of many small pieces: the work is linear in the number of pieces."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from spark_engine.runtime.server.api.responses_items import to_messages
from spark_engine.runtime.server.api.responses_tools import ToolNames
from spark_engine.runtime.text.messages import normalise
from spark_engine.runtime.text.parts import text_of

MANY, MOST_S = 100_000, 3.0  # joined one by one they take 10 s and more
PIECE = "a piece of 24 characters"
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": ""}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
REMINDERS = [{"role": "system", "content": PIECE}] * MANY


def _items(**item: Any) -> str:
    (message,) = to_messages([item] * MANY, ToolNames())
    return "".join(value for value in message.values() if len(value) > MANY)


@pytest.mark.parametrize(
    "read",
    [
        lambda: text_of([{"type": "text", "text": PIECE}] * MANY),
        lambda: text_of([{"type": "image", "text": None}] * MANY),
        lambda: text_of([{"type": "document", "content": [PIECE] * MANY}]),
        lambda: _items(type=PIECE),
        lambda: _items(role="assistant", content=PIECE),
        lambda: _items(type="reasoning", content=PIECE),
        lambda: normalise([CALLING, RESULT, *REMINDERS])[-1]["content"],
        lambda: normalise([CALLING, *REMINDERS, RESULT])[-1]["content"],
        lambda: normalise([CALLING, *REMINDERS])[-1]["content"],
    ],
)
def test_many_pieces_are_joined_once(read: Callable[[], str]) -> None:
    begin = time.thread_time()
    text = read()
    assert time.thread_time() - begin < MOST_S
    assert len(text) >= MANY * len(PIECE)
