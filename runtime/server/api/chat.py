"""/v1/chat/completions: from a body to a running conversation, and from its parts to JSON.

Knows OpenAI's chat form. What a conversation means is `Service.converse`'s business.
"""

from __future__ import annotations

from typing import Any

import msgspec

from spark_engine.runtime.engine.request import FinishReason
from spark_engine.runtime.server.api.answers import (
    FINISH,
    Json,
    Reply,
    chat_logprob,
    new_id,
    prompt_logprobs,
)
from spark_engine.runtime.server.api.chat_request import ChatRequest
from spark_engine.runtime.server.api.choices import ChoicesReply
from spark_engine.runtime.server.api.fields import BadField, decode
from spark_engine.runtime.server.service import Service
from spark_engine.runtime.text.reply_parser import ReplyParser
from spark_engine.runtime.text.reply_parts import Delta, Kind
from spark_engine.runtime.text.text_stream import Piece
from spark_engine.runtime.text.tokenizer import Tokenizer

REASONING_KEYS = ("reasoning_content", "reasoning")  # clients look for the one or the other


class ChatBody(ChatRequest, kw_only=True):
    """/v1/chat/completions: a conversation, and the names that tools had before they were tools."""

    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    echo: bool | None = None

    def modern(self) -> ChatRequest:
        """The same in today's names. Raises BadField where both are given."""
        if self.echo:
            raise BadField("echo is not supported for chats; use /v1/completions", "echo")
        if self.functions is None and self.function_call is None:
            return self
        for old, new in (("functions", "tools"), ("function_call", "tool_choice")):
            if getattr(self, old) is not None and getattr(self, new) is not None:
                raise BadField(f"{old} and {new} say the same; give {new}", old)
        choice = self.function_call
        if isinstance(choice, dict):
            choice = {"type": "function", "function": choice}
        tools = [{"type": "function", "function": f} for f in self.functions or []]
        return msgspec.structs.replace(self, tools=tools or None, tool_choice=choice)


async def start(service: Service, data: bytes) -> Reply:
    """Begins to answer one body. Raises RequestError, Busy, EngineDied, TimedOut."""
    deadline = service.deadline()

    def read() -> tuple[ChatRequest, bool]:
        body = decode(data, ChatBody)
        return service.accept(body.modern()), body.functions is not None

    chat, legacy = await service.checked(data, read, deadline)
    found = await service.converse(chat, deadline)
    tokenizer = None if chat.return_tokens_as_token_ids else service.tokenizer
    wanted = chat.wanted_logprobs()
    how = {"shown": found.shown, "legacy": legacy}
    forms = [ChatFormat(parser, tokenizer, wanted, **how) for parser in found.parsers]
    running = service.submit(chat, found.choices, found.prompt_tokens, deadline)

    def more() -> Json:
        if (most := chat.prompt_logprobs) is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(found.choices[0].stream.scored, most, tokenizer)}

    ident, name = new_id("chatcmpl"), service.names[0]
    return ChoicesReply(running, forms, "chat.completion", ident, name, more)


class ChatFormat:
    """One choice on its way to JSON. `legacy`: a call is a `function_call`, and there is one.

    `tokenizer` is for the words of log-probabilities, of which the `most` best are wanted (None:
    not even the token's own); `shown`: thoughts are part of the answer.
    """

    def __init__(
        self,
        parser: ReplyParser,
        tokenizer: Tokenizer | None,
        most: int | None,
        shown: bool = True,
        legacy: bool = False,
    ) -> None:
        self._parser = parser
        self._shown = shown
        self._tokenizer = tokenizer
        self._most = most
        self._logprobs: list[Json] | None = None if most is None else []
        self._texts: dict[Kind, str] = {}
        self._calls: list[Json] = []
        self._legacy = legacy

    def first(self) -> Json | None:
        """Clients expect the role before anything else."""
        return {"delta": {"role": "assistant", "content": ""}}

    def push(self, piece: Piece) -> Json:
        """`delta` with what is new, and the tokens' `logprobs`."""
        deltas = self._parser.push(piece.text, piece.marks)
        if piece.finish is not None:
            deltas += self._parser.flush()
        delta = self._delta(deltas)
        if self._legacy and (rows := delta.pop("tool_calls", None)) and not rows[0]["index"]:
            delta["function_call"] = rows[0]["function"]
        body: Json = {"delta": delta}
        if self._logprobs is not None and piece.tokens:
            entries = [chat_logprob(event, self._tokenizer, self._most) for event in piece.tokens]
            self._logprobs += entries
            body["logprobs"] = {"content": entries}
        return body

    def whole(self) -> Json:
        """`message` and `logprobs`."""
        message: Json = {"role": "assistant", "content": self._texts.get(Kind.CONTENT)}
        if Kind.REASONING in self._texts:
            message |= dict.fromkeys(REASONING_KEYS, self._texts[Kind.REASONING])
        if self._calls and self._legacy:
            message["function_call"] = self._calls[0]["function"]
        elif self._calls:
            message["tool_calls"] = [
                {k: v for k, v in c.items() if k != "index"} for c in self._calls
            ]
        elif message["content"] is None:
            message["content"] = ""
        logprobs = None if self._logprobs is None else {"content": self._logprobs}
        return {"message": message, "logprobs": logprobs}

    def finish(self, reason: FinishReason) -> str:
        """A complete tool call is a reason of its own."""
        if reason is FinishReason.STOP and self._parser.calls:
            return "function_call" if self._legacy else "tool_calls"
        return FINISH[reason]

    def _delta(self, deltas: list[Delta]) -> Json:
        body: Json = {}
        for delta in deltas:
            if delta.kind is Kind.CALL:
                rows, row = body.setdefault("tool_calls", []), self._call(delta)
                if rows and rows[-1]["index"] == row["index"]:
                    rows[-1]["function"]["arguments"] += delta.text
                else:
                    rows.append(row)
            elif self._shown or delta.kind is not Kind.REASONING:
                keys = REASONING_KEYS if delta.kind is Kind.REASONING else ("content",)
                body |= dict.fromkeys(keys, body.get(keys[0], "") + delta.text)
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
