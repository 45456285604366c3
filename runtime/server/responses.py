"""The JSON of answers: choices, deltas, log-probabilities, usage, errors, in OpenAI's form.

Knows the forms; knows no HTTP and no engine. A form takes the pieces of one choice and gives
either the body of each streamed chunk or, at the end, the whole choice.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Protocol

from spark_engine.runtime.engine.request import Event, FinishReason
from spark_engine.runtime.text.reply_parser import ReplyParser
from spark_engine.runtime.text.reply_parts import Delta, Kind
from spark_engine.runtime.text.text_stream import Piece
from spark_engine.runtime.text.tokenizer import Tokenizer

Json = dict[str, Any]
FINISH = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
}


class Form(Protocol):
    """One choice on its way to JSON."""

    def first(self) -> Json | None:
        """The body of a chunk that precedes the first token, or None."""
        ...

    def push(self, piece: Piece) -> Json:
        """The body of the chunk for this piece; empty values are left out."""
        ...

    def whole(self) -> Json:
        """The choice after its last piece."""
        ...

    def finish(self, reason: FinishReason) -> str:
        """OpenAI's word for the end."""
        ...


class ChatForm:
    """/v1/chat/completions."""

    def __init__(self, parser: ReplyParser, tokenizer: Tokenizer, logprobs: bool) -> None:
        self._parser = parser
        self._tokenizer = tokenizer
        self._logprobs: list[Json] | None = [] if logprobs else None
        self._texts: dict[Kind, str] = {}
        self._calls: list[Json] = []

    def first(self) -> Json | None:
        """Clients expect the role before anything else."""
        return {"delta": {"role": "assistant", "content": ""}}

    def push(self, piece: Piece) -> Json:
        """`delta` with what is new, and the tokens' `logprobs`."""
        deltas = self._parser.push(piece.text, piece.marks)
        if piece.finish is not None:
            deltas += self._parser.flush()
        body: Json = {"delta": self._delta(deltas)}
        if self._logprobs is not None and piece.tokens:
            entries = [chat_logprob(event, self._tokenizer) for event in piece.tokens]
            self._logprobs += entries
            body["logprobs"] = {"content": entries}
        return body

    def whole(self) -> Json:
        """`message` and `logprobs`."""
        message: Json = {"role": "assistant", "content": self._texts.get(Kind.CONTENT)}
        if Kind.REASONING in self._texts:
            message["reasoning_content"] = self._texts[Kind.REASONING]
        if self._calls:
            message["tool_calls"] = [
                {k: v for k, v in c.items() if k != "index"} for c in self._calls
            ]
        elif message["content"] is None:
            message["content"] = ""
        logprobs = None if self._logprobs is None else {"content": self._logprobs}
        return {"message": message, "logprobs": logprobs}

    def finish(self, reason: FinishReason) -> str:
        """A complete tool call is a reason of its own."""
        called = reason is FinishReason.STOP and self._parser.calls
        return "tool_calls" if called else FINISH[reason]

    def _delta(self, deltas: list[Delta]) -> Json:
        body: Json = {}
        for delta in deltas:
            if delta.kind is Kind.CALL:
                rows, row = body.setdefault("tool_calls", []), self._call(delta)
                if rows and rows[-1]["index"] == row["index"]:
                    rows[-1]["function"]["arguments"] += delta.text
                else:
                    rows.append(row)
            else:
                key = delta.kind.value
                body[key] = body.get(key, "") + delta.text
                self._texts[delta.kind] = self._texts.get(delta.kind, "") + delta.text
        return body

    def _call(self, delta: Delta) -> Json:
        """A call's first delta has its id and name, the others more of its arguments."""
        if delta.name:
            function = {"name": delta.name, "arguments": delta.text}
            call = {"id": new_id("call"), "type": "function", "function": function}
            self._calls.append({"index": len(self._calls), **call})
            return {**self._calls[-1], "function": dict(function)}
        last = self._calls[-1]
        last["function"]["arguments"] += delta.text
        return {"index": last["index"], "function": {"arguments": delta.text}}


class TextForm:
    """/v1/completions. `echo` is the text to put before the answer."""

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


def chat_logprob(event: Event, tokenizer: Tokenizer) -> Json:
    """One entry of `logprobs.content`."""
    entry = _entry(event.token, event.logprob, tokenizer)
    return {**entry, "top_logprobs": [_entry(i, value, tokenizer) for i, value in event.top]}


def _entry(token: int | None, logprob: float | None, tokenizer: Tokenizer) -> Json:
    data = b"" if token is None else tokenizer.token_bytes(token)
    return {"token": token_text(token, tokenizer), "logprob": logprob, "bytes": list(data)}


def token_text(token: int | None, tokenizer: Tokenizer | None) -> str:
    """The token alone as text; part of a character becomes U+FFFD."""
    if token is None or tokenizer is None:
        return "" if token is None else f"token_id:{token}"
    return tokenizer.token_bytes(token).decode("utf-8", "replace")


def usage(prompt: int, completion: int, cached: int, drafts: tuple[int, int] | None = None) -> Json:
    """Token counts. `cached`: those of the prompt that were not computed; `drafts`: those verified
    and those kept, of an engine that drafts."""
    total = prompt + completion
    counts: Json = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": total,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if drafts is not None:
        verified, kept = drafts
        counts["completion_tokens_details"] = {
            "accepted_prediction_tokens": kept,
            "rejected_prediction_tokens": verified - kept,
        }
    return counts


def error(message: str, kind: str, param: str | None = None, code: str | None = None) -> Json:
    """OpenAI's form of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def new_id(prefix: str) -> str:
    """An id that nobody has had, e.g. `chatcmpl-1f0c…`."""
    return f"{prefix}-{secrets.token_hex(12)}"
