"""An engine client without an engine: it takes requests and remembers them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spark_engine.interface import Limits
from spark_engine.runtime.engine.request import Event, Request
from spark_engine.runtime.engine.trace import NoTrace
from spark_engine.runtime.server.api import chat, completions, tokenize
from spark_engine.runtime.server.api.answers import Json, Reply
from spark_engine.runtime.server.client import Mailbox
from spark_engine.runtime.server.ipc import EngineInfo, Stats
from spark_engine.runtime.server.service import Service
from spark_engine.runtime.text.tokenizer import Tokenizer


class FakeClient:
    """Enough of `EngineClient`. Each request is answered by `script`, `size` events a round."""

    def __init__(self, script: Sequence[Event] = (), size: int = 1) -> None:
        self.max_queue, self.trace, self.pid = 4, NoTrace(), None
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


class Served(Service):
    """A service with the APIs at hand."""

    async def chat(self, data: bytes) -> Reply:
        return await chat.start(self, data)

    async def complete(self, data: bytes) -> Reply:
        return await completions.start(self, data)

    async def tokenize(self, data: bytes) -> Json:
        return await tokenize.tokenize(self, data)

    async def detokenize(self, data: bytes) -> Json:
        return await tokenize.detokenize(self, data)


def service(client: Any, tokenizer: Tokenizer | None, drafts: int = 0, **options: Any) -> Served:
    """A service of an engine with 64 tokens of context (or `context`) and 4 slots."""
    context = options.pop("context", 64)
    limits = Limits(max_seqs=4, max_context=context, pages=context, vocab=512, drafts=drafts)
    info = EngineInfo("fake", limits, (1,))
    return Served(client, info, tokenizer, options.pop("template", None), ["fake"], **options)
