"""/tokenize and /detokenize: text or messages to token ids, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from spark_engine.runtime.server.api.fields import BadField, decode, short
from spark_engine.runtime.server.prompts.contract import Blobs, Done, JobKind
from spark_engine.runtime.server.prompts.preparer import Preparer, json_of
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


def prepare_tokenize(preparer: Preparer, blobs: Sequence[bytes]) -> tuple[Done, list[bytes]]:
    """`tokens`, `count`, `max_model_len`. Raises RequestError."""
    body = decode(blobs[0], TokenizeBody)
    if (body.prompt is None) == (body.messages is None):
        raise BadField("give either prompt or messages", "prompt")
    preparer.need_tokenizer()
    if body.messages is None:
        ids = preparer.encode(body.prompt or "", "prompt")
    else:
        reader = preparer.reader
        options = reader.thinking({}, body.chat_template_kwargs).options
        text = reader.template.render(body.messages, body.tools, options)
        ids = preparer.encode(text, "messages")
    answer = {"tokens": ids, "count": len(ids), "max_model_len": preparer.max_model_len}
    return Done(), json_of(answer)


def prepare_detokenize(preparer: Preparer, blobs: Sequence[bytes]) -> tuple[Done, list[bytes]]:
    """`prompt`, special tokens included. Raises RequestError."""
    vocab = preparer.info.limits.vocab
    body = decode(blobs[0], DetokenizeBody)
    tokenizer = preparer.need_tokenizer()
    for token in body.tokens:
        if not 0 <= token < vocab:
            raise BadField(f"tokens holds {short(token)}; ids go from 0 to {vocab - 1}", "tokens")
    return Done(), json_of({"prompt": tokenizer.decode(body.tokens, skip_special=False)})


async def tokenize(service: Service, data: Blobs) -> bytes:
    """JSON: `tokens`, `count`, `max_model_len`."""
    return await service.compute(JobKind.TOKENIZE, data)


async def detokenize(service: Service, data: Blobs) -> bytes:
    """JSON: `prompt`."""
    return await service.compute(JobKind.DETOKENIZE, data)
