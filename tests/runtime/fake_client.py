"""An engine client without an engine: it takes requests and remembers them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spark_engine.interface import Limits
from spark_engine.runtime.engine.request import Event, Request
from spark_engine.runtime.server.client import Mailbox
from spark_engine.runtime.server.ipc import EngineInfo, Stats
from spark_engine.runtime.server.service import Service
from spark_engine.runtime.text.tokenizer import Tokenizer


class FakeClient:
    """Enough of `EngineClient`. Each request is answered by `script`, a token and an end."""

    def __init__(self, script: Sequence[Event] = ()) -> None:
        self.max_queue = 4
        self.stats, self.step_age, self.in_flight = Stats(), 0.0, 0
        self.submitted: list[Request] = []
        self.cancelled: list[int] = []
        self._script = script

    def submit(self, requests: Sequence[Request], box: Mailbox, slots: int) -> list[int]:
        ids = list(range(len(self.submitted), len(self.submitted) + len(requests)))
        self.submitted += requests
        for number in ids:
            for event in self._script:
                box.put_nowait(event._replace(request_id=number))
        return ids

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)

    def unhealthy_reason(self) -> str | None:
        return None


def service(client: Any, tokenizer: Tokenizer | None, **options: Any) -> Service:
    """A service of an engine with 64 tokens of context and 4 slots."""
    info = EngineInfo("fake", Limits(max_seqs=4, max_context=64, pages=4, vocab=512), (1,))
    return Service(client, info, tokenizer, options.pop("template", None), ["fake"], **options)
