"""/tokenize and /detokenize: their bodies."""

from __future__ import annotations

from typing import Any

import msgspec


class TokenizeBody(msgspec.Struct, kw_only=True):
    """/tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """/detokenize."""

    model: str | None = None
    tokens: list[int]
