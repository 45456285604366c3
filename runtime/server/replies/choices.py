"""Responses of one or more choices, whole or as chunks, for chat and completions.

Knows OpenAI's envelope (id, choices, usage, finish reasons). A `ChoiceFormat` makes the choices.
"""

import time
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import msgspec

from spark_engine.runtime.engine.request import FinishReason
from spark_engine.runtime.server.api.answers import Json
from spark_engine.runtime.server.service.service import Running
from spark_engine.runtime.text.text_stream import Piece

DONE = b"data: [DONE]\n\n"


class ChoiceFormat(Protocol):
    """The JSON of one choice."""

    def first(self) -> Json | None:
        """The body of a chunk that precedes the first token, or None. Called once, before the
        first piece with a token or an end."""
        ...

    def push(self, piece: Piece) -> Json:
        """The body of the chunk for this piece; empty values are omitted."""
        ...

    def whole(self) -> Json:
        """The choice after its last piece."""
        ...

    def finish(self, reason: FinishReason) -> str:
        """OpenAI's reason for the end."""
        ...


class ChoicesReply:
    """The answer of one request. `kind` is its `object`, and a chunk's without `.chunk`; `more` has
    fields that a whole answer adds to its choices."""

    def __init__(
        self,
        running: Running,
        forms: Sequence[ChoiceFormat],
        kind: str,
        ident: str,
        model: str,
        more: Json | None = None,
    ) -> None:
        self.running = running
        self.stream = bool(running.body.stream)
        self._forms = forms
        self._kind = kind
        self._more = more or {}
        self._header: Json = {"id": ident, "created": int(time.time()), "model": model}
        self._wanted = bool(running.body.return_token_ids)
        options = running.body.stream_options
        self._counted = bool(options and options.continuous_usage_stats)
        self._summed = bool(options and options.include_usage)
        self._started: set[int] = set()

    def close(self) -> None:
        self.running.generation.close()

    async def whole(self) -> Json:
        tokens: list[list[int]] = [[] for _ in self._forms]
        ends: dict[int, Piece] = {}
        async for index, piece in self.running.generation.pieces():
            self._first(index, piece)
            self._forms[index].push(piece)
            tokens[index] += _token_ids(piece)
            if piece.finish is not None:
                ends[index] = piece
        choices = []
        for i, form in enumerate(self._forms):
            choice = {"index": i, **form.whole(), **_end(form, ends[i])}
            if self._wanted:
                choice |= {"token_ids": tokens[i], "prompt_token_ids": self._prompt(i)}
            choices.append(choice)
        whole = {**self._header, "object": self._kind, "choices": choices}
        return {**whole, "usage": self.running.usage, **self._more}

    async def events(self) -> AsyncIterator[bytes]:
        async for index, piece in self.running.generation.pieces():
            if (first := self._first(index, piece)) is not None:
                yield self._chunk([first], self._counted)
            choice = self._piece(index, piece)
            if choice is not None:
                yield self._chunk([choice], self._counted)
        if self._summed:
            yield self._chunk([], True)
        yield DONE

    def last_words(self, status: int, problem: Json) -> bytes:
        return _event(problem) + DONE

    def _chunk(self, choices: list[Json], counted: bool) -> bytes:
        kind = self._kind + ".chunk" if self._kind == "chat.completion" else self._kind
        chunk = {**self._header, "object": kind, "choices": choices}
        if counted or self._summed:  # null until the last, as OpenAI says
            chunk["usage"] = self.running.usage if counted else None
        return _event(chunk)

    def _prompt(self, index: int) -> Sequence[int]:
        return self.running.choices[index].prompt

    def _first(self, index: int, piece: Piece) -> Json | None:
        """The chunk before the first token of a choice; None if there is none or it was sent."""
        if index in self._started or not (piece.tokens or piece.finish):
            return None
        self._started.add(index)
        first = self._forms[index].first()
        if first is None:
            return None
        extra = {"prompt_token_ids": self._prompt(index), "token_ids": []} if self._wanted else {}
        return {"index": index, **first, "finish_reason": None, **extra}

    def _piece(self, index: int, piece: Piece) -> Json | None:
        """One choice of a chunk, or None where it would be empty."""
        form = self._forms[index]
        body = form.push(piece)
        has_content = body.get("delta") or body.get("text") or "logprobs" in body
        if not (has_content or self._wanted or piece.finish):
            return None
        end = {"finish_reason": None} if piece.finish is None else _end(form, piece)
        choice = {"index": index, **body, **end}
        if self._wanted:
            choice["token_ids"] = _token_ids(piece)
        return choice


def _event(body: Json) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _token_ids(piece: Piece) -> list[int]:
    return [event.token for event in piece.tokens if event.token is not None]


def _end(form: ChoiceFormat, piece: Piece) -> Json:
    reason = piece.finish or FinishReason.STOP
    return {"finish_reason": form.finish(reason), "stop_reason": piece.stop}
