"""/tokenize and /detokenize: text or messages to token ids, and back."""

from __future__ import annotations

from typing import Any

import msgspec

from spark_engine.runtime.server.api.answers import Json
from spark_engine.runtime.server.api.fields import BadField, decode, short
from spark_engine.runtime.server.service import Service


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

    def read() -> list[int]:
        body = decode(data, TokenizeBody)
        if (body.prompt is None) == (body.messages is None):
            raise BadField("give either prompt or messages", "prompt")
        service.need_tokenizer()
        if body.messages is None:
            return service.encode(body.prompt or "", "prompt")
        text = service.render(body.messages, body.tools, body.chat_template_kwargs)
        return service.encode(text, "messages")

    ids = await service.aside(read)
    return {"tokens": ids, "count": len(ids), "max_model_len": service.max_model_len}


async def detokenize(service: Service, data: bytes) -> Json:
    """`prompt`, special tokens included."""
    vocab = service.info.limits.vocab

    def read() -> str:
        body = decode(data, DetokenizeBody)
        tokenizer = service.need_tokenizer()
        for token in body.tokens:
            if not 0 <= token < vocab:
                raise BadField(
                    f"tokens holds {short(token)}; ids go from 0 to {vocab - 1}", "tokens"
                )
        return tokenizer.decode(body.tokens, skip_special=False)

    return {"prompt": await service.aside(read)}
