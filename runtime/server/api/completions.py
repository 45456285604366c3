"""/v1/completions: prompts as text or as ids, and OpenAI's form of their answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spark_engine.runtime.engine.request import Event, FinishReason
from spark_engine.runtime.server.api.answers import FINISH, Json, Reply, new_id, token_text
from spark_engine.runtime.server.api.choices import ChoicesReply
from spark_engine.runtime.server.api.common import Body, limit_of
from spark_engine.runtime.server.api.fields import BadField, decode, is_id, short
from spark_engine.runtime.server.generation import Choice
from spark_engine.runtime.server.service import Service
from spark_engine.runtime.text.text_stream import Piece
from spark_engine.runtime.text.tokenizer import Tokenizer

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

    def check_own(self) -> None:
        """What is known and not supported. Raises BadField."""
        if self.suffix:
            raise BadField("suffix is not supported: the model does not fill in text", "suffix")
        if self.echo and self.logprobs is not None:
            raise BadField("logprobs of the prompt (echo with logprobs) are not supported", "echo")


async def start(service: Service, data: bytes) -> Reply:
    """Begins to answer one body. Raises RequestError, Busy, EngineDied, TimedOut."""
    deadline = service.deadline()

    def read_body() -> tuple[CompletionBody, list[str | list[int]]]:
        body = decode(data, CompletionBody)
        given = prompts(body.prompt)
        service.check(body, len(given))
        if any(isinstance(prompt, str) for prompt in given):
            service.need_tokenizer()
        return body, given

    body, given = await service.checked(data, read_body, deadline)

    def read() -> tuple[int, list[Choice], list[str]]:
        ids = [service.ids_of(prompt, body.truncate_prompt_tokens) for prompt in given]
        pairs = zip(given, ids, strict=True)
        echoes = [_echo(service, body, *pair) if body.echo else "" for pair in pairs]
        choices = [choice for prompt in ids for choice in service.choices(body, prompt)]
        return sum(map(len, ids)), choices, echoes

    total, choices, echoes = await service.read(read, deadline)
    wanted, n = body.logprobs is not None, body.n or 1
    tokenizer = None if body.return_tokens_as_token_ids else service.tokenizer
    forms = [TextForm(e, tokenizer, wanted) for e in echoes for _ in range(n)]
    running = service.submit(body, choices, total, deadline)
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
    service: Service, body: CompletionBody, prompt: str | Sequence[int], ids: Sequence[int]
) -> str:
    if isinstance(prompt, str) and body.truncate_prompt_tokens is None:
        return prompt
    return service.need_tokenizer().decode(ids)


class TextForm:
    """One choice on its way to JSON. `echo` is the text to put before the answer."""

    def __init__(self, echo: str, tokenizer: Tokenizer | None, logprobs: bool) -> None:
        self._echo = echo
        self._text = echo
        self._tokenizer = tokenizer
        self._logprobs = _TextLogprobs(tokenizer, len(echo)) if logprobs else None
        self._events: list[Event] = []

    def first(self) -> Json | None:
        """The echo, if one is wanted."""
        return {"text": self._echo} if self._echo else None

    def push(self, piece: Piece) -> Json:
        """`text` and the tokens' `logprobs`."""
        self._text += piece.text
        body: Json = {"text": piece.text}
        if self._logprobs is not None and piece.tokens:
            self._events += piece.tokens
            body["logprobs"] = self._logprobs.rows(piece.tokens)
        return body

    def whole(self) -> Json:
        """`text` and `logprobs`."""
        logprobs = None
        if self._logprobs is not None:
            logprobs = _TextLogprobs(self._tokenizer, len(self._echo)).rows(self._events)
        return {"text": self._text, "logprobs": logprobs}

    def finish(self, reason: FinishReason) -> str:
        """As the engine says."""
        return FINISH[reason]


class _TextLogprobs:
    """The completions form: four parallel lists. `offset` counts characters of token texts."""

    def __init__(self, tokenizer: Tokenizer | None, offset: int) -> None:
        self._tokenizer = tokenizer
        self._offset = offset

    def rows(self, events: Sequence[Event]) -> Json:
        body: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for event in events:
            text = token_text(event.token, self._tokenizer)
            body["tokens"].append(text)
            body["token_logprobs"].append(event.logprob)
            top = {token_text(i, self._tokenizer): value for i, value in event.top}
            body["top_logprobs"].append(top)
            body["text_offset"].append(self._offset)
            self._offset += len(text)
        return body
