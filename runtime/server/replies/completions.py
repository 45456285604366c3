"""Answers of /v1/completions in OpenAI's form."""

from collections.abc import Iterable, Sequence
from typing import Any

from spark_engine.runtime.engine.request import Event, FinishReason
from spark_engine.runtime.server.api import answers
from spark_engine.runtime.server.prompts.contract import Asked, Blobs, JobKind
from spark_engine.runtime.server.replies.choices import ChoicesReply
from spark_engine.runtime.server.service.service import Service
from spark_engine.runtime.text.text_stream import Piece, TextStream
from spark_engine.runtime.text.tokenizer import Tokenizer

ROWS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")  # of log-probabilities


async def start(service: Service, data: Blobs) -> answers.Reply:
    """Starts to answer one body. Raises RequestError, Busy, EngineDied, TimedOut."""
    deadline = service.deadline()
    found = await service.prepare(JobKind.COMPLETIONS, data, deadline)
    tokenizer = service.tokenizer if found.asked.words else None
    forms = [
        CompletionFormat(found.asked, choice.prompt, echo, tokenizer, choice.stream)
        for choice, echo in zip(found.choices, found.echoes, strict=True)
    ]
    running = service.submit(found, deadline)
    return ChoicesReply(running, forms, "text_completion", answers.new_id("cmpl"), service.names[0])


class CompletionFormat:
    """The JSON of one choice.

    `prompt`: its token ids; `echo`: the text to put before the answer. `tokenizer` is for the texts
    of log-probabilities; `stream` has the prompt's.
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
        self._echo = echo
        self._text = ""
        self._tokenizer = tokenizer
        self._offset = 0  # of the next token's text, in characters
        self._rows: answers.Json = {key: [] for key in ROWS}
        self._scored: list[Any] = [None]  # the prompt's tokens; the first has no probability
        self._echoed = bool(echo) and body.logprobs is not None
        if self._echoed:
            self._legacy_logprobs([Event(0, prompt[0])])
        if len(prompt) > 1:  # else the only token is generated for nothing
            stream.on_scored = self._score

    def first(self) -> answers.Json | None:
        """The echo, if it was requested, with its log-probabilities."""
        self._text = self._echo
        if not self._echo:
            return None
        return {"text": self._echo} | ({"logprobs": self._rows} if self._echoed else {})

    def push(self, piece: Piece) -> answers.Json:
        self._text += piece.text
        body: answers.Json = {"text": piece.text}
        if self._body.logprobs is not None and piece.tokens:
            body["logprobs"] = self._legacy_logprobs(piece.tokens)
        return body

    def whole(self) -> answers.Json:
        logprobs = None if self._body.logprobs is None else self._rows
        body: answers.Json = {"text": self._text, "logprobs": logprobs}
        if self._body.prompt_logprobs is not None:
            body["prompt_logprobs"] = self._scored
        return body

    def finish(self, reason: FinishReason) -> str:
        return answers.FINISH[reason]

    def _score(self, event: Event) -> None:
        """Takes one token of the prompt when it comes: all at once would take too long."""
        if self._echoed:
            self._legacy_logprobs([event])
        if (most := self._body.prompt_logprobs) is not None:
            self._scored.append(answers.prompt_logprob(event, self._tokenizer, most))

    def _legacy_logprobs(self, events: Iterable[Event]) -> answers.Json:
        """The rows of these tokens, which are added to all."""
        rows: answers.Json = {key: [] for key in ROWS}
        for event in events:
            text = answers.token_text(event.token, self._tokenizer)
            rows["tokens"].append(text)
            rows["token_logprobs"].append(event.logprob)
            best = event.top[: self._body.logprobs]
            top = {answers.token_text(i, self._tokenizer): value for i, value in best}
            rows["top_logprobs"].append(None if event.logprob is None else answers.raw(top))
            rows["text_offset"].append(self._offset)
            self._offset += len(text)
        for key in ROWS:
            self._rows[key] += rows[key]
        return rows
