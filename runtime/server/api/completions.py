"""/v1/completions: prompts as text or as ids, and OpenAI's form of their answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, partial
from typing import Any

from spark_engine.runtime.engine.request import Event, FinishReason
from spark_engine.runtime.server.api.answers import (
    FINISH,
    Json,
    Reply,
    new_id,
    prompt_logprobs,
    token_text,
)
from spark_engine.runtime.server.api.choices import ChoicesReply
from spark_engine.runtime.server.api.common import Body, limit_of
from spark_engine.runtime.server.api.fields import BadField, decode, is_id, short
from spark_engine.runtime.server.prompts.contract import Asked, Blobs, JobKind, Prepared
from spark_engine.runtime.server.prompts.preparer import Preparer, check_texts
from spark_engine.runtime.server.service import Service
from spark_engine.runtime.text.text_stream import Piece, TextStream
from spark_engine.runtime.text.tokenizer import Tokenizer

ROWS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")  # of log-probabilities
COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; chat generates as much as fits


class CompletionBody(Body, kw_only=True):
    """/v1/completions. `prompt` is checked by `prompts`."""

    prompt: str | list[str | int | list[int]]  # one type refuses most nonsense before it is built
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None

    def most_tokens(self) -> int | None:
        """A default is added, which `min_tokens` may raise."""
        if self.max_tokens is not None:
            return limit_of(self.max_tokens)
        return max(COMPLETION_TOKENS, self.min_tokens or 0)

    def wanted_logprobs(self) -> int | None:
        """One field says it."""
        return self.logprobs

    def scores_prompt(self) -> bool:
        """An echo with log-probabilities has those of the prompt, too; one without an answer runs
        in the same way, since something must run."""
        echo = bool(self.echo and (self.logprobs is not None or self.max_tokens == 0))
        return super().scores_prompt() or echo

    def check_own(self) -> None:
        """What is known and not supported. Raises BadField."""
        if self.suffix:
            raise BadField("suffix is not supported: the model does not fill in text", "suffix")


def prepare(preparer: Preparer, blobs: Sequence[bytes]) -> tuple[Prepared, list[bytes]]:
    """Reads one body. Raises RequestError."""
    body = decode(blobs[0], CompletionBody)
    given = prompts(body.prompt)
    preparer.check(body, len(given))
    texts = [prompt for prompt in given if isinstance(prompt, str)]
    if texts:
        preparer.need_tokenizer()
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


async def start(service: Service, data: Blobs) -> Reply:
    """Begins to answer one body. Raises RequestError, Busy, EngineDied, TimedOut."""
    deadline = service.deadline()
    found = await service.prepare(JobKind.COMPLETIONS, data, deadline)
    tokenizer = service.tokenizer if found.asked.words else None
    forms = [
        CompletionFormat(found.asked, choice.prompt, echo, tokenizer, choice.stream)
        for choice, echo in zip(found.choices, found.echoes, strict=True)
    ]
    running = service.submit(found, deadline)
    return ChoicesReply(running, forms, "text_completion", new_id("cmpl"), service.names[0])


def prompts(value: Any) -> list[str | list[int]]:
    """The four forms of `prompt` as a list. Raises BadField."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(is_id(v) for v in value):
            return [value]
        if all(isinstance(v, str) for v in value):
            return list(value)
        if all(isinstance(v, list) and v and all(is_id(i) for i in v) for v in value):
            return list(value)
    words = "a string, a list of strings, a list of token ids or a list of such lists, none empty"
    raise BadField(f"prompt is {short(value)}; it must be {words}", "prompt")


def _echo(
    preparer: Preparer, body: CompletionBody, prompt: str | Sequence[int], ids: Sequence[int]
) -> str:
    if isinstance(prompt, str) and body.truncate_prompt_tokens is None:
        return prompt
    return preparer.need_tokenizer().decode(ids)


class CompletionFormat:
    """One choice on its way to JSON.

    `prompt`: its token ids; `echo`: the text to put before the answer. `tokenizer` is for the words
    of log-probabilities; `stream` has those of the prompt, where they are wanted.
    """

    def __init__(
        self,
        body: Asked,
        prompt: Sequence[int],
        echo: str,
        tokenizer: Tokenizer | None,
        stream: TextStream,
    ) -> None:
        self._body = body
        self._prompt = prompt
        self._echo = echo
        self._text = ""
        self._tokenizer = tokenizer
        self._stream = stream
        self._offset = 0  # of the next token's text, in characters
        self._rows: Json = {key: [] for key in ROWS}

    def first(self) -> Json | None:
        """The echo, if one is wanted, with its log-probabilities."""
        if not self._echo:
            return None
        self._text = self._echo
        if self._body.logprobs is None:
            return {"text": self._echo}
        start = Event(0, self._prompt[0])  # nothing foretold it
        return {"text": self._echo, "logprobs": self._chances([start, *self._stream.scored])}

    def push(self, piece: Piece) -> Json:
        """`text` and the tokens' `logprobs`."""
        self._text += piece.text
        body: Json = {"text": piece.text}
        if self._body.logprobs is not None and piece.tokens:
            body["logprobs"] = self._chances(piece.tokens)
        return body

    def whole(self) -> Json:
        """`text`, `logprobs` and the prompt's own, where they are wanted."""
        logprobs = None if self._body.logprobs is None else self._rows
        body: Json = {"text": self._text, "logprobs": logprobs}
        if self._body.prompt_logprobs is not None:
            most = self._body.prompt_logprobs
            body["prompt_logprobs"] = prompt_logprobs(self._stream.scored, most, self._tokenizer)
        return body

    def finish(self, reason: FinishReason) -> str:
        """As the engine says."""
        return FINISH[reason]

    def _chances(self, events: Iterable[Event]) -> Json:
        """The rows of these tokens, which are added to all."""
        rows: Json = {key: [] for key in ROWS}
        for event in events:
            text = token_text(event.token, self._tokenizer)
            rows["tokens"].append(text)
            rows["token_logprobs"].append(event.logprob)
            best = event.top[: self._body.logprobs]
            top = {token_text(i, self._tokenizer): value for i, value in best}
            rows["top_logprobs"].append(None if event.logprob is None else top)
            rows["text_offset"].append(self._offset)
            self._offset += len(text)
        for key in ROWS:
            self._rows[key] += rows[key]
        return rows
