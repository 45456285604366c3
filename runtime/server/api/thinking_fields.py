"""The fields of thinking in the bodies of the APIs that are translated.

Knows names only; their meaning is in `runtime/text/thinking.py`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from spark_engine.runtime.server.api.chat_request import ChatRequest
from spark_engine.runtime.text.thinking import FIELDS


class ThinkingFields(msgspec.Struct, kw_only=True):
    """The same as in a `ChatRequest`. Null is the same as absent."""

    enable_thinking: bool | None = None
    enableThinking: bool | None = None  # noqa: N815 (as its clients write it)
    think: bool | str | None = None
    thinking: bool | dict[str, Any] | None = None
    reasoning: bool | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    thinking_budget: float | None = None
    thinking_token_budget: float | None = None
    budget_tokens: float | None = None
    max_reasoning_tokens: float | None = None
    reasoning_budget: float | None = None
    thinking_budget_tokens: float | None = None
    include_reasoning: bool | None = None

    def copy_to(self, chat: ChatRequest) -> bool:
        """Sets these fields of a chat. Returns whether one of them decides about thinking."""
        given = {name: getattr(self, name) for name in FIELDS}
        for name, value in given.items():
            setattr(chat, name, value)
        del given["include_reasoning"]
        return any(value is not None for value in given.values())
