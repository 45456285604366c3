"""Answers of /v1/messages, whole or as events."""

import hashlib
from collections.abc import AsyncIterator
from typing import Any

from pydantic_core import from_json

from spark_engine.runtime.engine.request import FinishReason
from spark_engine.runtime.server.api.answers import Json, Reply, anthropic_error, event, new_id
from spark_engine.runtime.server.api.fields import renamed
from spark_engine.runtime.server.api.messages import NAMES, PLACES
from spark_engine.runtime.server.prompts.contract import Blobs, JobKind
from spark_engine.runtime.server.replies.blocks import BlockChange, Blocks, ReplyBlock
from spark_engine.runtime.server.service.service import PreparedChoices, Running, Service
from spark_engine.runtime.text.reply_parts import Kind
from spark_engine.runtime.text.text_stream import Piece
from spark_engine.runtime.text.tokenizer import need


async def start(service: Service, data: Blobs) -> Reply:
    """Starts to answer one body. Raises RequestError, Busy, EngineDied, TimedOut."""
    deadline = service.deadline()
    with renamed(NAMES, PLACES):  # for a form that its worker refuses
        found = await service.prepare(JobKind.MESSAGES, data, deadline)
    running = service.submit(found, deadline)
    return MessagesReply(running, found, service, new_id("msg", "_"), found.asked.managed)


class MessagesReply:
    """The answer to one conversation. `managed`: the client requested edits of its context; the
    answer says that none was applied."""

    def __init__(
        self,
        running: Running,
        found: PreparedChoices,
        service: Service,
        ident: str,
        managed: bool = False,
    ) -> None:
        tokenizer = need(service.tokenizer)
        self.stream = bool(running.body.stream)
        self._running = running
        self._blocks = Blocks(found.parsers[0], found.asked.thinking, tokenizer.marks)
        self._shown = found.asked.shown
        self._header: Json = {"id": ident, "type": "message", "role": "assistant"}
        self._header |= {"model": service.names[0]}
        self._edits: Json = {"context_management": {"applied_edits": []}} if managed else {}
        self._indices: dict[int, int] = {}  # of blocks that are shown, by their own

    def close(self) -> None:
        self._running.generation.close()

    async def whole(self) -> Json:
        last: Piece | None = None
        async for _, last in self._running.generation.pieces():
            self._blocks.push(last)
        content = [_content(b) for b in self._blocks.all if self._is_shown(b)]
        end = {**self._end(last), "usage": self._usage(), **self._edits}
        return {**self._header, "content": content, **end}

    async def events(self) -> AsyncIterator[bytes]:
        last: Piece | None = None
        async for _, piece in self._running.generation.pieces():
            if last is None:
                yield self._begin()
            last = piece
            for step in self._blocks.push(piece):
                if self._is_shown(step.block):
                    yield self._event(step)
        end = self._end(last)
        yield event("message_delta", {"delta": end, "usage": self._usage(), **self._edits})
        yield event("message_stop", {})

    def last_words(self, status: int, problem: Json) -> bytes:
        return event("error", anthropic_error(status, problem))

    def _is_shown(self, block: ReplyBlock) -> bool:
        return self._shown or block.kind is not Kind.REASONING

    def _begin(self) -> bytes:
        nothing: Json = {"content": [], "stop_reason": None, "stop_sequence": None}
        usage = {**self._usage(), "output_tokens": 0}
        message = {**self._header, **nothing, "usage": usage}
        return event("message_start", {"message": message}) + event("ping", {})

    def _event(self, step: BlockChange) -> bytes:
        block, text = step.block, step.text
        index = self._indices.setdefault(block.index, len(self._indices))
        if step.closed:
            sealed = b""
            if block.kind is Kind.REASONING:
                seal = {"type": "signature_delta", "signature": _signature(block)}
                sealed = event("content_block_delta", {"index": index, "delta": seal})
            return sealed + event("content_block_stop", {"index": index})
        if text is None:
            empty = _content(ReplyBlock(block.kind, 0, block.ident, block.name, "", block.call))
            if block.kind is Kind.REASONING:
                empty["signature"] = ""
            return event("content_block_start", {"index": index, "content_block": empty})
        delta = {
            Kind.REASONING: {"type": "thinking_delta", "thinking": text},
            Kind.CONTENT: {"type": "text_delta", "text": text},
            Kind.CALL: {"type": "input_json_delta", "partial_json": text},
        }[block.kind]
        return event("content_block_delta", {"index": index, "delta": delta})

    def _end(self, last: Piece | None) -> Json:
        finish = last.finish if last is not None else None
        reason = "max_tokens" if finish is FinishReason.LENGTH else "end_turn"
        if last is not None and last.stop is not None:
            reason = "stop_sequence"
        elif finish is FinishReason.STOP and self._blocks.calls and not self._blocks.is_cut:
            reason = "tool_use"
        elif finish is FinishReason.CANCELLED:
            reason = "pause_turn"  # the server shuts down
        return {"stop_reason": reason, "stop_sequence": last.stop if last is not None else None}

    def _usage(self) -> Json:
        """Anthropic counts cached prompt tokens separately."""
        counts = self._running.usage
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        drafts = counts.get("completion_tokens_details", {}).get("drafts")
        return {
            "input_tokens": counts["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": counts["completion_tokens"],
            **({"drafts": drafts} if drafts else {}),
        }


def _content(block: ReplyBlock) -> Json:
    if block.kind is Kind.REASONING:
        return {"type": "thinking", "thinking": block.text, "signature": _signature(block)}
    if block.kind is Kind.CONTENT:
        return {"type": "text", "text": block.text}
    named = {"type": "tool_use", "id": block.call, "name": block.name}
    return {**named, "input": _input(block.text)}


def _input(text: str) -> Any:
    """A call's arguments, as far as they were generated."""
    value = from_json(text, allow_partial="trailing-strings") if text else {}
    return value if isinstance(value, dict) else {}


def _signature(block: ReplyBlock) -> str:
    """Clients keep a thought only with a signature; this one is not a proof of anything."""
    return f"unsigned-{hashlib.sha256(block.text.encode()).hexdigest()[:16]}"
