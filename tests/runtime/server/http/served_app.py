"""An application behind uvicorn, in the event loop of a test."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn


@asynccontextmanager
async def serving(config: uvicorn.Config, *listeners: socket.socket) -> AsyncIterator[int]:
    """Its port; what runs when the block is left is ended."""
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve([*listeners] or None))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield (listeners or server.servers[0].sockets)[0].getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        await task
