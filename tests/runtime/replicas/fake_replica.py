"""A replica without an engine: an HTTP server in this process, controlled by prompts.

DIE       closes the connection without an answer HALF      sends two events and half of a third,
and closes HANG      sends one event and no more BUSY      503 BROKEN    500, like a failed engine
WAIT      answers after `gate` is set
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

WORDS = ("one ", "two ", "three ")


def event(text: str, **more: Any) -> bytes:
    return f"data: {json.dumps({'text': text, **more})}\n\n".encode()


class FakeReplica:
    """A fake replica. `asked`: the received bodies; `heads`: their headers."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self.healthy, self.hung = True, False
        self.asked: list[Any] = []
        self.heads: list[dict[str, str]] = []
        self.left = 0  # clients that disconnected before the end of their answer
        self.kept: set[str] = set()
        self.looked: list[str] = []  # paths of all GETs except health checks, in order
        self.slow_s = 0.0  # delay of the answer to whether it stores an id
        self.locked = False  # refuses every key
        self.gate = asyncio.Event()
        self.url = ""

    async def health(self, _: web.Request) -> web.Response:
        if self.hung:
            await asyncio.sleep(600)
        words = {"status": "ok" if self.healthy else "unhealthy"}
        return web.json_response(words, status=200 if self.healthy else 503)

    @web.middleware
    async def note(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.method == "GET" and request.path != "/health":
            self.looked.append(request.raw_path)
        answer: web.StreamResponse = await handler(request)
        return answer

    async def metrics(self, request: web.Request) -> web.Response:
        if self.mark == "locked" and "authorization" not in request.headers:
            return web.json_response({"error": {}}, status=401)
        text = "# HELP a words\n# TYPE a counter\na_total 2.0\n# HELP b w\n# TYPE b histogram\n"
        return web.Response(text=text + f'b_bucket{{le="1",m="{self.mark}"}} 3\nb_count{{}} 4\n')

    async def models(self, _: web.Request) -> web.Response:
        if self.locked:
            return web.json_response({"error": {"message": "no key"}}, status=401)
        return web.json_response({"data": []})

    async def one(self, request: web.Request) -> web.Response:
        ident = request.match_info["id"]
        await asyncio.sleep(self.slow_s)
        if self.locked:
            return web.json_response({"error": {"message": "no key"}}, status=401)
        if ident not in self.kept:
            return web.json_response({"error": {"message": "none kept"}}, status=404)
        return web.json_response({"id": ident, "from": self.mark, "target": request.raw_path})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.heads.append(dict(request.headers))
        body = await request.json()
        self.asked.append(body)
        said = json.dumps(body)
        if "DIE" in said:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if "BUSY" in said:
            return web.json_response({"error": {"code": "busy", "by": self.mark}}, status=503)
        if "BROKEN" in said:
            return web.json_response({"error": {"code": "engine_error"}}, status=500)
        if "WAIT" in said:
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.left += 1
                raise
        if not body.get("stream"):
            ident = f"resp_{self.mark}_{len(self.asked)}"
            self.kept.add(ident)
            return web.json_response({"id": ident, "from": self.mark, "words": WORDS})
        return await self._stream(request, said)

    async def _stream(self, request: web.Request, said: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        try:
            for word in WORDS[: 1 if "HANG" in said else 2]:
                await response.write(event(word, by=self.mark))
            if "HALF" in said:
                await response.write(event("never seen")[:9])
                await asyncio.sleep(0.05)
                assert request.transport is not None
                request.transport.abort()
            if "HANG" in said:
                await asyncio.sleep(600)
            await response.write(event(WORDS[2]) + b"data: [DONE]\n\n")
        except (asyncio.CancelledError, ConnectionError):
            self.left += 1
            raise
        return response


@asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def replica(mark: str) -> AsyncIterator[FakeReplica]:
    fake, app = FakeReplica(mark), web.Application()
    app.router.add_get("/health", fake.health)
    app.router.add_get("/metrics", fake.metrics)
    app.router.add_get("/v1/responses/{id}", fake.one)
    app.router.add_get("/v1/models", fake.models)
    app.middlewares.append(fake.note)
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
        app.router.add_post(path, fake.answer)
    async with serving(app) as fake.url:
        yield fake
