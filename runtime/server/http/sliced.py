"""JSON that may be long, sent in slices; the event loop does other work in between."""

import asyncio
from collections.abc import Sequence

from starlette.background import BackgroundTask
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from spark_engine.runtime.server.api.answers import Part

SLICE = 256 << 10  # bytes: sending one takes far less than a millisecond


class SlicedJson(Response):
    media_type = "application/json"

    def __init__(self, parts: Sequence[Part], status_code: int = 200) -> None:
        self._parts = parts
        size = sum(len(part) for part in parts)
        super().__init__(None, status_code, {"content-length": str(size)}, self.media_type)
        self.background: BackgroundTask | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        for part in self._parts:
            for at in range(0, len(part), SLICE):
                body = bytes(part[at : at + SLICE])
                await send({"type": "http.response.body", "body": body, "more_body": True})
                await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})
