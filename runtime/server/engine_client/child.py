"""A child process that an event loop waits for, also one that was started before the loop.

Knows processes; knows no message.
"""

import asyncio
import contextlib
import subprocess
import threading


class Child:
    """Made in the event loop. `stdin`: the pipe to it, not buffered."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.pid, self.stdin = process.pid, process.stdin
        self.kill, self.send_signal = process.kill, process.send_signal
        self._end: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        threading.Thread(target=self._watch, args=(process,), daemon=True).start()

    @property
    def returncode(self) -> int | None:
        return self._end.result() if self._end.done() else None

    async def wait(self) -> int:
        """Its exit code, once it has ended."""
        return await asyncio.shield(self._end)

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        with contextlib.suppress(RuntimeError):  # the event loop has ended before
            self._end.get_loop().call_soon_threadsafe(self._end.set_result, code)
