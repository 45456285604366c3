"""/tokenize and /detokenize: text or messages to token ids, and back."""

from __future__ import annotations

from typing import Any

import msgspec

from spark_engine.runtime.server.api.answers import Json
from spark_engine.runtime.server.api.fields import BadField, decode
from spark_engine.runtime.server.service import MOST_CHARACTERS, Service


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


async def tokenize(service: Service, data: bytes) -> Json:
    """`tokens`, `count`, `max_model_len`."""
    body = decode(data, TokenizeBody)
    if (body.prompt is None) == (body.messages is None):
        raise BadField("give either prompt or messages", "prompt")
    tokenizer = service.need_tokenizer()

    def read() -> list[int]:
        text = body.prompt or ""
        if body.messages is not None:
            text = service.render(body.messages, body.tools, body.chat_template_kwargs)
        if len(text) > MOST_CHARACTERS:
            words = f"the text has {len(text)} characters; at most {MOST_CHARACTERS} are tokenised"
            raise BadField(words, "prompt" if body.messages is None else "messages")
        return tokenizer.encode(text)

    ids = await service.aside(read)
    return {"tokens": ids, "count": len(ids), "max_model_len": service.max_model_len}


async def detokenize(service: Service, data: bytes) -> Json:
    """`prompt`, special tokens included."""
    body = decode(data, DetokenizeBody)
    tokenizer, vocab = service.need_tokenizer(), service.info.limits.vocab

    def read() -> str:
        for token in body.tokens:
            if not 0 <= token < vocab:
                raise BadField(f"tokens holds {token}; ids go from 0 to {vocab - 1}", "tokens")
        return tokenizer.decode(body.tokens, skip_special=False)

    return {"prompt": await service.aside(read)}
