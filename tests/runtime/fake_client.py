"""An engine client without an engine: it takes requests and remembers them."""

import json
from collections.abc import Sequence
from typing import Any

from spark_engine.interface import Limits
from spark_engine.runtime.engine.request import Event, Request
from spark_engine.runtime.engine.trace import NoTrace
from spark_engine.runtime.server.api.answers import Json, Reply
from spark_engine.runtime.server.engine_client.client import Mailbox
from spark_engine.runtime.server.engine_client.ipc import EngineInfo, Stats
from spark_engine.runtime.server.prompts import contract
from spark_engine.runtime.server.prompts.chat_options import ChatOptions
from spark_engine.runtime.server.prompts.handler import Handler
from spark_engine.runtime.server.replies import chat, completions
from spark_engine.runtime.server.service.service import Service
from spark_engine.runtime.text.chat import ChatTemplate
from spark_engine.runtime.text.reply_formats import Formats
from spark_engine.runtime.text.tokenizer import Tokenizer


class FakeClient:
    """Enough of `EngineClient`. Each request is answered by `script`, `size` events a round."""

    def __init__(self, script: Sequence[Event] = (), size: int = 1) -> None:
        self.max_queue, self.trace, self.pid, self.state = 4, NoTrace(), None, None
        self.stats, self.step_age, self.in_flight = Stats(), 0.0, 0
        self.submitted: list[Request] = []
        self.cancelled: list[int] = []
        self._script, self._size = script, size

    def submit(self, requests: Sequence[Request], box: Mailbox, slots: int) -> list[int]:
        ids = list(range(len(self.submitted), len(self.submitted) + len(requests)))
        self.submitted += requests
        for number in ids:
            events = [event._replace(request_id=number) for event in self._script]
            for at in range(0, len(events), self._size):
                box.put_nowait(events[at : at + self._size])
        return ids

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)

    def unhealthy_reason(self) -> str | None:
        return None


class Inline:
    """A pool without processes and limits: jobs are done in the calling thread."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.jobs: list[contract.JobKind] = []

    async def run(
        self,
        kind: contract.JobKind,
        blobs: Sequence[contract.Blobs],
        owner: str = "",
        fetched: tuple[contract.Fetched, ...] = (),
    ) -> tuple[contract.Result, list[bytes]]:
        return self.do(kind, blobs, fetched)

    def do(
        self,
        kind: contract.JobKind,
        blobs: Sequence[contract.Blobs],
        fetched: tuple[contract.Fetched, ...] = (),
    ) -> tuple[contract.Result, list[bytes]]:
        """The same, for any thread."""
        self.jobs.append(kind)
        whole = [b"".join(parts) for parts in blobs]
        header, found = self.handler.handle(
            contract.encode(contract.PromptJob(kind, 0.0, fetched)), whole
        )
        return contract.decode_result(header), found

    def refuse_one(self, owner: str) -> bool:
        return False

    def unhealthy_reason(self) -> str | None:
        return None


class Served(Service):
    """A service with the APIs at hand."""

    async def chat(self, data: bytes) -> Reply:
        return await chat.start(self, [data])

    async def complete(self, data: bytes) -> Reply:
        return await completions.start(self, [data])

    async def tokenize(self, data: bytes) -> Json:
        return _json(await self.compute(contract.JobKind.TOKENIZE, [data]))

    async def detokenize(self, data: bytes) -> Json:
        return _json(await self.compute(contract.JobKind.DETOKENIZE, [data]))


def _json(data: bytes) -> Json:
    found: Json = json.loads(data)
    return found


def service(client: Any, tokenizer: Tokenizer | None, drafts: int = 0, **options: Any) -> Served:
    """A service of an engine with 64 tokens of context (or `context`) and 4 slots, which reads
    bodies in this process, or by `pool`. `vision`: how it reads images."""
    context = options.pop("context", 64)
    rows = 4096 if "vision" in options else 0
    limits = Limits(4, context, pages=context, vocab=512, drafts=drafts, image_rows=rows)
    info = EngineInfo("fake", limits, (1,), vision=options.pop("vision", None))
    template = options.pop("template", None)
    how = options.pop("chat", ChatOptions()), options.pop("allow_priority", False)
    pool = options.pop("pool", None) or inline(client, info, tokenizer, template, *how)
    formats = Formats.of(template.source if template else None, how[0].reasoning, how[0].tools)
    return Served(client, info, tokenizer, pool, ["fake"], formats, **options)


def inline(
    client: Any,
    info: EngineInfo,
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
    chat: ChatOptions | None = None,
    allow_priority: bool = False,
) -> Inline:
    most = info.limits.max_seqs + client.max_queue
    setup = contract.Setup(info, ("fake",), chat or ChatOptions(), allow_priority, most)
    return Inline(Handler(setup, tokenizer, template))
