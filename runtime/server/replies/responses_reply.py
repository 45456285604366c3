"""Answers of /v1/responses, whole or as events.

Knows OpenAI's items: a thought is a `reasoning` item, text a `message`, a call a `function_call`,
or a `custom_tool_call` where its tool takes a text.
"""

import asyncio
import base64
import logging
from collections.abc import AsyncIterator
from typing import Any

from spark_engine.runtime.engine.request import FinishReason
from spark_engine.runtime.server.api.answers import Json, chat_logprob, event
from spark_engine.runtime.server.api.responses_tools import ToolName, ToolNames
from spark_engine.runtime.server.api.stored_items import StoredItems
from spark_engine.runtime.server.operation.http_request import note_problem
from spark_engine.runtime.server.replies.blocks import PREFIXES, BlockChange, Blocks, ReplyBlock
from spark_engine.runtime.server.replies.custom_input import CustomInput
from spark_engine.runtime.server.replies.errors import error_response
from spark_engine.runtime.server.service.service import PreparedChoices, Running, Service
from spark_engine.runtime.server.service.stored_responses import ResponseStore, StoredResponse
from spark_engine.runtime.text.reply_parts import Kind
from spark_engine.runtime.text.text_stream import Piece
from spark_engine.runtime.text.tokenizer import need

CANCELLED = "cancelled"
_NONE = -1  # the index of no block
log = logging.getLogger(__name__)


class ResponsesReply:
    """One response. `head` is its initial JSON, which is completed; `names`: of its tools."""

    def __init__(
        self,
        running: Running,
        found: PreparedChoices,
        service: Service,
        head: Json,
        logprobs: bool,
        names: ToolNames,
    ) -> None:
        self.stream = bool(running.body.stream)
        self._running = running
        self._tokenizer = need(service.tokenizer)
        self._blocks = Blocks(found.parsers[0], found.asked.thinking, self._tokenizer.marks)
        self._shown = found.asked.shown
        self._response = head
        self._logprobs = logprobs
        self._names = names
        self._inputs: dict[int, CustomInput] = {}  # of custom tools, by block
        self._block_logprobs: dict[int, list[Any]] = {}  # log-probabilities by block
        self._new_logprobs: list[Any] = []  # those of this round
        self._places: dict[int, int] = {}  # of blocks that are shown, in the output
        self._number = 0  # of the next event
        self._entry: StoredResponse | None = None
        self._kept: ResponseStore | None = None
        self._alone = False
        self._status = "incomplete"  # of the response and its last item, if it ended now

    def keep(self, kept: ResponseStore, before: StoredItems, owner: str) -> None:
        """Stores the response, which answers `before`; it can be cancelled while it runs. Raises
        what `ResponseStore.put` raises."""
        self._entry, self._kept = kept.put(self._response, before, owner, self._cancel), kept

    def run_by_itself(self) -> None:
        """Runs it in the background; `keep` was called before."""
        assert self._entry is not None
        self._alone = True
        self._entry.task = asyncio.create_task(self._finish())

    def close(self) -> None:
        """Ends it unless it runs in the background. May be called twice."""
        if not self._alone:
            self._running.generation.close()
            self._set_cancelled()

    async def whole(self) -> Json:
        """The whole response, or the current state of one in the background. Raises what
        `Generation.pieces` raises."""
        if not self._alone:
            try:
                await self._collect()
            except Exception as problem:
                self._fail_by(problem)
                raise
        return self._response

    async def events(self) -> AsyncIterator[bytes]:
        last: Piece | None = None
        async for _, piece in self._running.generation.pieces():
            if last is None:
                yield self._event("created", response=self._response)
                yield self._event("in_progress", response=self._response)
            last = piece
            for step in self._push(piece):
                for made in self._step(step):
                    yield made
        self._close(last)
        status = self._response["status"]
        yield self._event("incomplete" if status == CANCELLED else status, response=self._response)

    def last_words(self, status: int, problem: Json) -> bytes:
        words = problem["error"]
        self._fail(words)
        plain = {"code": words["code"], "message": words["message"], "param": words["param"]}
        failed = self._event("failed", response=self._response)
        return self._named("error", **plain) + failed

    async def _collect(self) -> None:
        last = None
        async for _, last in self._running.generation.pieces():
            self._push(last)
        self._close(last)

    async def _finish(self) -> None:
        try:
            await self._collect()
        except Exception as problem:
            log.warning("a response in the background failed: %s", problem)
            self._fail_by(problem)
        finally:
            self._running.generation.close()

    def _cancel(self) -> None:
        """A request to cancel it: it ends as cancelled, with its output so far."""
        self._running.generation.cancel()
        self._set_cancelled()

    def _set_cancelled(self) -> None:
        if self._response["status"] == "in_progress":
            self._response["status"] = CANCELLED
            self._response["output"] = self._output("incomplete")
            self._update()

    def _fail_by(self, problem: Exception) -> None:
        """Fails with the message for clients; that of a bug is only logged."""
        _, answer = error_response(problem)
        note_problem(answer["error"])
        self._fail(answer["error"])

    def _fail(self, words: Json) -> None:
        self._response["status"] = "failed"
        self._response["error"] = {"code": words["code"] or "error", "message": words["message"]}
        self._update()

    def _close(self, last: Piece | None) -> None:
        finish = last.finish if last is not None else None
        if self._response["status"] == "in_progress":
            self._response["status"] = self._status
            if self._status == "incomplete":
                reason = "incomplete_call" if self._blocks.is_cut else "server_shutdown"
                reason = "max_output_tokens" if finish is FinishReason.LENGTH else reason
                self._response["incomplete_details"] = {"reason": reason}
        self._response["output"] = self._output(self._status)
        self._response["usage"] = self._usage()
        self._update()

    def _update(self) -> None:
        if self._entry is not None and self._kept is not None:
            runs = self._response["status"] == "in_progress"
            self._kept.update(self._entry, self._response, self._cancel if runs else None)

    def _push(self, piece: Piece) -> list[BlockChange]:
        steps = self._as_tools(self._blocks.push(piece))
        if piece.finish is FinishReason.STOP and not self._blocks.is_cut:
            self._status = "completed"
        self._new_logprobs = []
        if self._logprobs and self._blocks.all:
            self._new_logprobs = [chat_logprob(one, self._tokenizer) for one in piece.tokens]
            rows = self._block_logprobs.setdefault(self._blocks.all[-1].index, [])
            rows += self._new_logprobs
        return [step for step in steps if self._shown or step.block.kind is not Kind.REASONING]

    def _as_tools(self, steps: list[BlockChange]) -> list[BlockChange]:
        """The same steps; what custom tools are given is taken out of the JSON of their calls."""
        made: list[BlockChange] = []
        for step in steps:
            block = step.block
            if block.kind is not Kind.CALL or not self._names.of(block.name).custom:
                made.append(step)
                continue
            if step.text is None and not step.closed:
                block.ident = "ctc" + block.ident.removeprefix(PREFIXES[Kind.CALL])
            given = self._inputs.setdefault(block.index, CustomInput())
            text = given.end() if step.closed else given.push(step.text or "")
            made += [BlockChange(block, text)] if text else []
            made += [step] if step.closed or step.text is None else []
        return made

    def _output(self, status: str) -> list[Json]:
        """All items; `status` is the last one's."""
        shown = [b for b in self._blocks.all if self._shown or b.kind is not Kind.REASONING]
        done = [self._item(block, "completed") for block in shown[:-1]]
        return done + [self._item(block, status) for block in shown[-1:]]

    def _item(self, block: ReplyBlock, status: str) -> Json:
        named: Json = {"id": block.ident, "status": status}
        if block.kind is Kind.REASONING:
            content = [{"type": "reasoning_text", "text": block.text}] if block.text else []
            sealed = base64.b64encode(block.text.encode()).decode() if block.text else None
            thought = {"summary": [], "content": content, "encrypted_content": sealed}
            return {"type": "reasoning", **named, **thought}
        if block.kind is Kind.CALL:
            return self._call(block, named)
        content = [self._part(block)] if block.text else []
        return {"type": "message", **named, "role": "assistant", "content": content}

    def _call(self, block: ReplyBlock, named: Json) -> Json:
        tool = self._names.of(block.name)
        space = {} if tool.namespace is None else {"namespace": tool.namespace}
        named |= {"call_id": block.call, "name": tool.name, **space}
        if not tool.custom:
            return {"type": "function_call", **named, "arguments": block.text}
        text = self._inputs[block.index].text if block.index in self._inputs else ""
        return {"type": "custom_tool_call", **named, "input": text}

    def _part(self, block: ReplyBlock) -> Json:
        logprobs = self._block_logprobs.get(block.index, [])
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}

    def _step(self, step: BlockChange) -> list[bytes]:
        block, text = step.block, step.text
        place = self._places.setdefault(block.index, len(self._places))
        at: Json = {"output_index": place, "item_id": block.ident}
        if step.closed:
            status = self._status if step.last else "completed"
            ends = self._ends(block, at, status)
            item = self._item(block, status)
            return [*ends, self._event("output_item.done", output_index=place, item=item)]
        if text is None:
            empty = ReplyBlock(block.kind, _NONE, block.ident, block.name, "", block.call)
            item = self._item(empty, "in_progress")
            opened = [self._event("output_item.added", output_index=place, item=item)]
            if block.kind is Kind.CALL:
                return opened
            part = self._part(empty)
            if block.kind is Kind.REASONING:
                part = {"type": "reasoning_text", "text": ""}
            return [*opened, self._event("content_part.added", **at, content_index=0, part=part)]
        if block.kind is Kind.CALL:
            return [self._event(f"{_inner(self._names.of(block.name))}.delta", **at, delta=text)]
        if block.kind is Kind.REASONING:
            return [self._event("reasoning_text.delta", **at, content_index=0, delta=text)]
        logprobs, self._new_logprobs = self._new_logprobs, []
        more: Json = {"content_index": 0, "delta": text, "logprobs": logprobs}
        return [self._event("output_text.delta", **at, **more)]

    def _ends(self, block: ReplyBlock, at: Json, status: str) -> list[bytes]:
        """The events that end an item's contents; arguments are done only if complete."""
        text = block.text
        if block.kind is Kind.CALL:
            if status != "completed":
                return []
            tool = self._names.of(block.name)
            own = {"name": tool.name, "arguments": text}
            if tool.custom:
                own = {"input": self._inputs[block.index].text}
            return [self._event(f"{_inner(tool)}.done", **at, **own)]
        if block.kind is Kind.REASONING:
            part: Json = {"type": "reasoning_text", "text": text}
            done = self._event("reasoning_text.done", **at, content_index=0, text=text)
        else:
            part = self._part(block)
            more = {"content_index": 0, "text": text, "logprobs": part["logprobs"]}
            done = self._event("output_text.done", **at, **more)
        return [done, self._event("content_part.done", **at, content_index=0, part=part)]

    def _usage(self) -> Json:
        counts = self._running.usage
        drafts = counts.get("completion_tokens_details", {}).get("drafts")
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"],
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": self._blocks.thought_tokens,
                **({"drafts": drafts} if drafts else {}),
            },
            "total_tokens": counts["total_tokens"],
        }

    def _event(self, kind: str, **body: Any) -> bytes:
        return self._named(f"response.{kind}", **body)

    def _named(self, kind: str, **body: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return event(kind, {"sequence_number": number, **body})


def _inner(tool: ToolName) -> str:
    """The name of the events of a call's contents."""
    return "custom_tool_call_input" if tool.custom else "function_call_arguments"
