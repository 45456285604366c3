"""A server that says what a test scripted: answers to GET by path, and to POST in parts.

Knows as much HTTP as a client of ours needs.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Part = bytes | float  # to send, or seconds to wait
Answer = tuple[int, list[Part]]  # status; b"" at the end is left out: the connection is cut


class Scripted:
    """`get` by path, `post` from the body; `asked` are the bodies in the order they came."""

    def __init__(self, get: dict[str, Any], post: Callable[[dict[str, Any]], Answer]) -> None:
        self._get, self._post = get, post
        self.asked: list[dict[str, Any]] = []
        self.headers: list[bytes] = []
        self.url = ""
        self.late_s = 0.0  # that nothing of this process ran meanwhile

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                method, path, _ = head.decode().split(" ", 2)
                self.headers.append(head)
                if method == "GET":
                    status, parts = 200, [json.dumps(self._get.get(path, {})).encode()]
                    if path not in self._get:
                        status = 404
                else:
                    length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                    self.asked.append(json.loads(await reader.readexactly(length)))
                    status, parts = self._post(self.asked[-1])
                writer.write(b"HTTP/1.1 %d X\r\nTransfer-Encoding: chunked\r\n\r\n" % status)
                if not await self._send(writer, parts):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _send(self, writer: asyncio.StreamWriter, parts: list[Part]) -> bool:
        for part in parts:
            if isinstance(part, float):
                await asyncio.sleep(part)
            elif not part:
                return False
            else:
                writer.write(b"%x\r\n%b\r\n" % (len(part), part))
                await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


@contextmanager
def running(server: Scripted) -> Iterator[Scripted]:
    """Serves in a thread while the `with` lasts."""
    ready, ended = threading.Event(), threading.Event()

    async def run() -> None:
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        ready.set()
        await asyncio.to_thread(ended.wait)  # those that are still answered are cancelled then

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        yield server
    finally:
        ended.set()
        thread.join()


def event(row: dict[str, Any] | str) -> bytes:
    return f"data: {row if isinstance(row, str) else json.dumps(row)}\n\n".encode()


def token(text: str, known: int, prompt: int = 3, **more: Any) -> bytes:
    """An event of /v1/completions that brings text, and says how many tokens there are so far."""
    usage = {"prompt_tokens": prompt, "completion_tokens": known}
    return event({"choices": [{"index": 0, "text": text, **more}], "usage": usage})
