"""Starts one engine process, exchanges messages with it, asks it for a dump, ends it.

Knows processes, sockets and signals; knows no request, and does not decide about restarts.
"""

import asyncio
import contextlib
import logging
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.asyncio

from spark_engine.command import BUG, SHORT, USER
from spark_engine.runtime.server.engine_client.child import Child
from spark_engine.runtime.server.engine_client.dumps import ASK, STACKS, STATE, read_black_box
from spark_engine.runtime.server.engine_client.early import WORKER, EarlyProcess, spawn

EXIT_S = 5.0  # time for the process to exit by itself
KILLED_S = 10.0  # time for the process to end after SIGKILL
LAST_WORDS_S = 2.0
ANSWER_S = 2.0  # for its stacks and state, which its thread writes
SIGNAL_S = 1.0  # for the stacks alone, if that thread does not answer
SOCKET_PATH_MAX = 90  # bytes; Unix sockets allow 107
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Death:
    """Why a process ended. `user`: a user's error; `passing`: a restart may succeed; `final`: every
    restart would fail too."""

    reason: str
    user: bool = False
    passing: bool = False
    final: bool = False

    @property
    def code(self) -> int:
        """The server's exit code when it ends for this reason."""
        return SHORT if self.passing else USER if self.user else BUG


class EngineProcess:
    """One process. `command` starts it; the socket's address is appended. `take` is called with
    its messages. All methods run in one event loop."""

    def __init__(
        self, command: Sequence[str], context: zmq.asyncio.Context, take: Callable[[bytes], None]
    ) -> None:
        """Raises OSError or ZMQError where its socket cannot be made."""
        self._command = tuple(command)
        self._socket = context.socket(zmq.PAIR)
        try:
            self._folder = _socket_folder()
        except OSError:
            self._socket.close()
            raise
        self._take = take
        self._process: Child | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.ended: asyncio.Future[Death] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self, early: EarlyProcess | None = None) -> None:
        """Starts it, or takes `early`, if that runs and has no orders, where the command is WORKER
        and its arguments; messages or `ended` follow. Raises OSError, ZMQError."""
        self._socket.set_hwm(0)
        self._socket.linger = 0
        address = f"ipc://{self._folder}/engine"
        self._socket.bind(address)
        words = (*self._command, address)
        taken = None if early is None else early.take(words[len(WORKER) :])
        self._process = Child(taken or spawn(words))
        self._tasks = [asyncio.create_task(t) for t in (self._receive(), self._wait())]

    @property
    def gone(self) -> bool:
        """Whether nothing of it runs, so that its memory is free."""
        return self._process is None or self._process.returncode is not None

    def send(self, *frames: bytes) -> None:
        """Sends a message; large frames are not copied. It is lost if the process has ended."""
        # without a high-water mark a send never waits, so the future is done at once
        self._socket.send_multipart(frames, copy=False)

    def record_death(self, death: Death) -> None:
        """Records why it ended; the first reason counts."""
        if not self.ended.done():
            self.ended.set_result(death)

    async def dump(self) -> dict[str, str]:
        """A dump of its stacks and its state, as far as it still responds, by name."""
        read_black_box(self._folder)  # discards older dumps
        process = self._process
        if process is not None and process.returncode is None and process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # it has ended, or is being closed
                process.stdin.write(ASK)
                if not await self._writes((STACKS, STATE), ANSWER_S) and self._handles_signals():
                    process.send_signal(signal.SIGUSR1)
                    await self._writes((STACKS,), SIGNAL_S)
        return self.crash_dump()

    def crash_dump(self) -> dict[str, str]:
        return read_black_box(self._folder)

    async def close(self, patience_s: float = EXIT_S) -> bool:
        """Ends the process, after `patience_s` by a signal. Returns whether it has ended.

        May be called twice.
        """
        gone = await self._end(patience_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        return gone

    async def _end(self, patience_s: float) -> bool:
        process = self._process
        if process is None:
            return True
        if process.stdin is not None:
            process.stdin.close()
        await _ends(process, patience_s)
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await _ends(process, KILLED_S)
        return process.returncode is not None

    def _handles_signals(self) -> bool:
        """Before it is ready the signal would end it; if it wrote its stacks, Python runs in it."""
        path = self._folder / STACKS
        return path.exists() and not path.stat().st_size

    async def _writes(self, names: Sequence[str], seconds: float) -> bool:
        paths = [self._folder / name for name in names]
        end = time.monotonic() + seconds
        while not all(path.exists() and path.stat().st_size for path in paths):
            if time.monotonic() > end:
                return False
            await asyncio.sleep(0.05)
        return True

    async def _receive(self) -> None:
        try:
            while True:
                self._take(await self._socket.recv())
        except Exception as error:  # the socket failed, or a message is malformed
            log.exception("a message of the engine process failed")
            words = (
                f"the engine process's messages cannot be read ({type(error).__name__}: {error})"
            )
            self.record_death(Death(words))

    async def _wait(self) -> None:
        assert self._process is not None
        code = await self._process.wait()
        end = time.monotonic() + LAST_WORDS_S
        if code in (BUG, USER):  # it sent the reason: zmq's thread may not have read it yet
            await asyncio.wait({self.ended}, timeout=LAST_WORDS_S)
        while await self._socket.poll(50) and time.monotonic() < end:
            await asyncio.sleep(0.01)  # `_receive` reads its last message
        self.record_death(Death(f"the engine process ended with code {code}{hint(code)}"))


async def _ends(process: Child, seconds: float) -> None:
    """Waits for its end. Python 3.11's `asyncio.wait_for` swallows a cancellation that comes just
    as the process ends: the supervisor would restart an engine that is being unloaded."""
    end = asyncio.ensure_future(process.wait())
    try:
        await asyncio.wait({end}, timeout=seconds)
    finally:
        end.cancel()


def hint(code: int) -> str:
    """The meaning of an exit code, for the log; a negative one is a signal's number."""
    if code >= 0:
        return ""
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "an unknown signal"
    if -code == signal.SIGKILL:
        return f" ({name}: out of memory? `journalctl -k` or `dmesg` shows what the kernel ended)"
    return f" ({name})"


def _socket_folder() -> Path:
    """A folder that only this user can read, with a path short enough for a Unix socket."""
    folder = Path(tempfile.mkdtemp(prefix="spark-"))
    if len(str(folder)) > SOCKET_PATH_MAX:
        with contextlib.suppress(OSError):
            folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="spark-", dir="/tmp"))
    return folder
