"""Answers of /v1/chat/completions: OpenAI's form of messages, thoughts and calls."""

from typing import Any

from spark_engine.runtime.engine.request import FinishReason
from spark_engine.runtime.server.api import answers
from spark_engine.runtime.server.api.answers import Json, chat_logprob
from spark_engine.runtime.server.prompts.contract import Blobs, JobKind
from spark_engine.runtime.server.replies.choices import ChoicesReply
from spark_engine.runtime.server.replies.custom_input import CustomInput
from spark_engine.runtime.server.service.service import Service
from spark_engine.runtime.text.reply_parser import ReplyParser
from spark_engine.runtime.text.reply_parts import Delta, Kind
from spark_engine.runtime.text.text_stream import Piece
from spark_engine.runtime.text.tokenizer import Tokenizer

REASONING_KEYS = ("reasoning_content", "reasoning")  # clients read one or the other


async def start(service: Service, data: Blobs) -> answers.Reply:
    """Starts to answer one body. Raises RequestError, Busy, EngineDied, TimedOut."""
    deadline = service.deadline()
    found = await service.prepare(JobKind.CHAT, data, deadline)
    asked = found.asked
    tokenizer = service.tokenizer if asked.words else None
    how = asked.shown, asked.legacy, asked.custom
    forms = [ChatFormat(parser, tokenizer, asked.logprobs, *how) for parser in found.parsers]
    more: Json = {}
    if (most := asked.prompt_logprobs) is not None:
        rows: list[Any] = [None]
        more["prompt_logprobs"] = rows
        first, score = found.choices[0], answers.prompt_logprob
        if first.prompt_tokens > 1:  # else the only token is generated for nothing
            first.stream.on_scored = lambda event: rows.append(score(event, tokenizer, most))
    running = service.submit(found, deadline)
    ident, name = answers.new_id("chatcmpl"), service.names[0]
    return ChoicesReply(running, forms, "chat.completion", ident, name, more)


class ChatFormat:
    """The JSON of one choice. `legacy`: a call is a `function_call`, and there is at most one.

    `tokenizer` is for the texts of log-probabilities, of which the `most` best are included (None:
    no log-probabilities); `shown`: thoughts are part of the answer; `custom`: tools that take a
    text.
    """

    def __init__(
        self,
        parser: ReplyParser,
        tokenizer: Tokenizer | None,
        most: int | None,
        shown: bool = True,
        legacy: bool = False,
        custom: frozenset[str] = frozenset(),
    ) -> None:
        self._parser = parser
        self._shown = shown
        self._tokenizer = tokenizer
        self._most = most
        self._logprobs: list[Any] | None = None if most is None else []
        self._texts: dict[Kind, str] = {}
        self._calls: list[Json] = []
        self._legacy = legacy
        self._custom = custom
        self._input: CustomInput | None = None  # of the last call, if its tool is a custom one

    def first(self) -> Json | None:
        """The role, which clients expect first."""
        return {"delta": {"role": "assistant", "content": ""}}

    def push(self, piece: Piece) -> Json:
        deltas = self._parser.push(piece.text, piece.marks)
        if piece.finish is not None:
            deltas += self._parser.flush(piece.is_cut)
        delta = self._delta(deltas)
        if piece.finish is not None:
            self._end_input(delta)
        if self._legacy and (rows := delta.pop("tool_calls", None)) and not rows[0]["index"]:
            delta["function_call"] = rows[0]["function"]
        body: Json = {"delta": delta}
        if self._logprobs is not None and piece.tokens:
            entries = [chat_logprob(event, self._tokenizer, self._most) for event in piece.tokens]
            self._logprobs += entries
            body["logprobs"] = {"content": entries}
        return body

    def whole(self) -> Json:
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
        """A special reason for tool calls, unless the last is not complete: clients run calls of
        this reason."""
        if reason is FinishReason.STOP and self._parser.calls and not self._parser.is_cut:
            return "function_call" if self._legacy else "tool_calls"
        return answers.FINISH[reason]

    def _delta(self, deltas: list[Delta]) -> Json:
        body: Json = {}
        for delta in deltas:
            if delta.kind is Kind.CALL:
                self._add(body, delta)
            elif self._shown or delta.kind is not Kind.REASONING:
                keys = REASONING_KEYS if delta.kind is Kind.REASONING else ("content",)
                body |= dict.fromkeys(keys, body.get(keys[0], "") + delta.text)
                self._texts[delta.kind] = self._texts.get(delta.kind, "") + delta.text
        return body

    def _add(self, body: Json, delta: Delta) -> None:
        """A call's first delta has its id and name, the others parts of its arguments."""
        if delta.name:
            self._end_input(body)
            self._input = CustomInput() if delta.name in self._custom else None
            kind, key = ("function", "arguments") if self._input is None else ("custom", "input")
            call = {"id": answers.new_id("call"), "type": kind, kind: {"name": delta.name, key: ""}}
            self._calls.append({"index": len(self._calls), **call})
            row = {**self._calls[-1], kind: dict(self._calls[-1][kind])}
            body.setdefault("tool_calls", []).append(row)
        more = delta.text if self._input is None else self._input.push(delta.text)
        self._say(body, more)

    def _end_input(self, body: Json) -> None:
        if self._input is not None:
            self._say(body, self._input.end())

    def _say(self, body: Json, text: str) -> None:
        """Adds text to the last call, in its row of this delta."""
        last, rows = self._calls[-1], body.setdefault("tool_calls", [])
        kind, key = ("function", "arguments") if "function" in last else ("custom", "input")
        last[kind][key] += text
        if rows and rows[-1]["index"] == last["index"]:
            rows[-1][kind][key] += text
        elif text:
            rows.append({"index": last["index"], kind: {key: text}})
        if not rows:
            del body["tool_calls"]
