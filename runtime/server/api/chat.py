"""/v1/chat/completions: from a body to a running conversation, and from its parts to JSON.

Knows OpenAI's chat form. What a conversation means is `Service.converse`'s business.
"""

from __future__ import annotations

from spark_engine.runtime.engine.request import FinishReason
from spark_engine.runtime.server.api.answers import FINISH, Json, Reply, chat_logprob, new_id
from spark_engine.runtime.server.api.choices import ChoicesReply
from spark_engine.runtime.server.api.fields import decode
from spark_engine.runtime.server.api.job import ChatJob
from spark_engine.runtime.server.service import Service
from spark_engine.runtime.text.reply_parser import ReplyParser
from spark_engine.runtime.text.reply_parts import Delta, Kind
from spark_engine.runtime.text.text_stream import Piece
from spark_engine.runtime.text.tokenizer import Tokenizer

REASONING_KEYS = ("reasoning_content", "reasoning")  # clients look for the one or the other


async def start(service: Service, data: bytes) -> Reply:
    """Begins to answer one body. Raises RequestError, Busy, EngineDied, TimedOut."""
    deadline = service.deadline()
    job = await service.checked(data, lambda: service.accept(decode(data, ChatJob)), deadline)
    found = await service.converse(job, deadline)
    tokenizer, logprobs = service.need_tokenizer(), bool(job.logprobs)
    forms = [ChatForm(parser, tokenizer, logprobs, found.shown) for parser in found.parsers]
    running = service.submit(job, found.choices, found.prompt_tokens, deadline)
    return ChoicesReply(running, forms, "chat.completion", new_id("chatcmpl"), service.names[0])


class ChatForm:
    """One choice on its way to JSON."""

    def __init__(
        self, parser: ReplyParser, tokenizer: Tokenizer, logprobs: bool, shown: bool = True
    ) -> None:
        """`shown`: thoughts are part of the answer."""
        self._parser = parser
        self._shown = shown
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
            message |= dict.fromkeys(REASONING_KEYS, self._texts[Kind.REASONING])
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
