"""Reads a body of each API: one function for each kind of job.

Runs in a worker process. What the APIs share is in `preparer.py`.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING

import msgspec

from spark_engine.runtime.server.api import messages, responses
from spark_engine.runtime.server.api.answers import Json
from spark_engine.runtime.server.api.chat import ChatBody
from spark_engine.runtime.server.api.common import check
from spark_engine.runtime.server.api.completions import (
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    prompts,
)
from spark_engine.runtime.server.api.fields import BadField, ModelField, decode, renamed, short
from spark_engine.runtime.server.api.messages import CountBody, MessagesBody
from spark_engine.runtime.server.api.responses import ResponsesBody
from spark_engine.runtime.server.api.stored_items import store_items
from spark_engine.runtime.server.prompts.contract import (
    Asked,
    Done,
    JobKind,
    Missing,
    Prepared,
    Result,
)
from spark_engine.runtime.server.prompts.preparer import Preparer, check_texts, json_of
from spark_engine.runtime.text.tokenizer import need

if TYPE_CHECKING:
    from spark_engine.runtime.server.prompts.prompt_images import PromptImages

Read = Callable[[Preparer, Sequence[bytes]], tuple[Result, list[bytes]]]


def read_chat(preparer: Preparer, blobs: Sequence[bytes]) -> tuple[Prepared, list[bytes]]:
    body = decode(blobs[0], ChatBody, halves=True)
    chat, custom = body.modern()
    asked = Asked(legacy=body.functions is not None, custom=custom)
    chat = preparer.accept(chat)
    if (images := preparer.images()) is not None:
        images.take(chat.messages, "messages")
    return preparer.converse(chat, asked, images)


def read_completion(preparer: Preparer, blobs: Sequence[bytes]) -> tuple[Prepared, list[bytes]]:
    body = decode(blobs[0], CompletionBody)
    given = prompts(body.prompt)
    preparer.check(body, len(given))
    texts = [prompt for prompt in given if isinstance(prompt, str)]
    if texts:
        need(preparer.tokenizer)
    if body.truncate_prompt_tokens is None:
        check_texts(texts)
    ids = [preparer.ids_of(prompt, body.truncate_prompt_tokens) for prompt in given]
    pairs = zip(given, ids, strict=True)
    echoes = [_echo(preparer, body, *pair) for pair in pairs] if body.echo else ()
    reader = preparer.reader
    form = cache(lambda thinking: reader.form(body, thinking))  # one for all prompts
    thoughts = [reader.opens_thought(prompt) for prompt in ids]
    forms = [(form(thinking), partial(reader.bind, thinking)) for thinking in thoughts]
    return preparer.prepared(body, ids, forms, preparer.asked(body, Asked()), echoes)


def _echo(
    preparer: Preparer, body: CompletionBody, prompt: str | Sequence[int], ids: Sequence[int]
) -> str:
    if isinstance(prompt, str) and body.truncate_prompt_tokens is None:
        return prompt
    return need(preparer.tokenizer).decode(ids)


def read_response(
    preparer: Preparer, blobs: Sequence[bytes]
) -> tuple[Prepared | Missing, list[bytes]]:
    """Reads one body; further blobs are the items and the answer of `previous_response_id`. Returns
    Missing where they are needed and absent. Raises RequestError."""
    body = decode(blobs[0], ResponsesBody, halves=True)
    before: list[Json] = []
    if body.previous_response_id:
        if len(blobs) == 1:
            return Missing(body.previous_response_id), []
        before = msgspec.json.decode(blobs[1])
        before += msgspec.json.decode(blobs[2])["output"]
    items = responses.items_of(body, before)
    asked = Asked(background=bool(body.background), store=body.store is not False)
    asked.token_logprobs = responses.LOGPROBS in (body.include or ())
    with renamed(responses.NAMES, responses.PLACES):
        stored = store_items(items)  # it bounds their number
        if (images := preparer.images()) is not None:
            images.take(items, "input", len(body.input or ()) - len(items))
        chat, names = responses.to_chat_request(body, items)
        asked.names = names.special()
        found, prompts = preparer.converse(preparer.accept(chat), asked, images)
    ends = array("Q", stored.ends).tobytes()
    return found, [
        *prompts,
        stored.data,
        ends,
        msgspec.json.encode(responses.repeated_fields(body)),
    ]


def read_message(preparer: Preparer, blobs: Sequence[bytes]) -> tuple[Prepared, list[bytes]]:
    with renamed(messages.NAMES, messages.PLACES):
        body = decode(blobs[0], MessagesBody, halves=True)
        asked = Asked(managed=body.context_management is not None)
        images = _take(preparer, body)
        return preparer.converse(preparer.accept(messages.to_chat_request(body)), asked, images)


def _take(preparer: Preparer, body: CountBody) -> "PromptImages | None":
    """The images of a body; replaces them by marks."""
    if (images := preparer.images()) is not None:
        images.take(body.messages, "messages")
        # one that cannot be read is a note: the same text comes with every request
        images.take([{"content": body.system}], "system")
    return images


def count_message(preparer: Preparer, blobs: Sequence[bytes]) -> tuple[Done, list[bytes]]:
    with renamed(messages.NAMES, messages.PLACES):
        body = decode(blobs[0], CountBody, halves=True)
        images = _take(preparer, body)
        chat = messages.to_chat_request(body)
        check(chat)
        tokens = len(preparer.encode(preparer.read(chat, images).text, "messages", images))
    managed = body.context_management is not None
    edited: Json = {"context_management": {"original_input_tokens": tokens}} if managed else {}
    return Done(), json_of({"input_tokens": tokens, **edited})


def read_tokenize(preparer: Preparer, blobs: Sequence[bytes]) -> tuple[Done, list[bytes]]:
    """`tokens`, `count`, `max_model_len`. Raises RequestError."""
    body = decode(blobs[0], TokenizeBody)
    if (body.prompt is None) == (body.messages is None):
        raise BadField("give either prompt or messages", "prompt")
    need(preparer.tokenizer)
    if body.messages is None:
        ids = preparer.encode(body.prompt or "", "prompt")
    else:
        reader = preparer.reader
        options = reader.thinking({}, body.chat_template_kwargs).options
        if (images := preparer.images()) is not None:
            images.take(body.messages, "messages")
        marks = None if images is None else images.marks
        text = reader.template.render(body.messages, body.tools, options, marks)
        ids = preparer.encode(text, "messages", images)
    answer = {"tokens": ids, "count": len(ids), "max_model_len": preparer.max_model_len}
    return Done(), json_of(answer)


def read_detokenize(preparer: Preparer, blobs: Sequence[bytes]) -> tuple[Done, list[bytes]]:
    """`prompt`, special tokens included. Raises RequestError."""
    vocab = preparer.info.limits.vocab
    body = decode(blobs[0], DetokenizeBody)
    tokenizer = need(preparer.tokenizer)
    for token in body.tokens:
        if not 0 <= token < vocab:
            raise BadField(f"tokens holds {short(token)}; ids go from 0 to {vocab - 1}", "tokens")
    return Done(), json_of({"prompt": tokenizer.decode(body.tokens, skip_special=False)})


def read_model(preparer: Preparer, blobs: Sequence[bytes]) -> tuple[Done, list[bytes]]:
    return Done(), json_of(ModelField.of(blobs[0]))


READS: Mapping[JobKind, Read] = {
    JobKind.CHAT: read_chat,
    JobKind.COMPLETIONS: read_completion,
    JobKind.RESPONSES: read_response,
    JobKind.MESSAGES: read_message,
    JobKind.COUNT: count_message,
    JobKind.TOKENIZE: read_tokenize,
    JobKind.DETOKENIZE: read_detokenize,
    JobKind.MODEL: read_model,
}
