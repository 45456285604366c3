"""The HTTP process's side of the processes that read prompts: starts, calls and ends them.

Knows processes and sockets; knows no queue and no kind of job. All methods run in one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from spark_engine.errors import EngineError, InternalError
from spark_engine.runtime.server.prompts import contract, frames
from spark_engine.runtime.server.prompts.contract import Blobs, Setup
from spark_engine.runtime.server.prompts.limits import HELLO_S, LOAD_S

STATUS_S = 1.0  # for a worker's exit status after its socket closed


class Gone(Exception):
    """A process ended. `status`: as of `os.waitstatus_to_exitcode`; None: unknown."""

    def __init__(self, status: int | None = None) -> None:
        super().__init__(f"ended with {status}")
        self.status = status


def command(folder: Path) -> tuple[str, ...]:
    """The command of the process that forks the workers; the socket's number is appended."""
    # one thread each, or a fork would copy locks that are never released
    single = ("TOKENIZERS_PARALLELISM=false", "OPENBLAS_NUM_THREADS=1", "OMP_NUM_THREADS=1")
    python = sys.executable, "-P", "-m", "spark_engine.runtime.server.prompts.worker"
    return ("/usr/bin/env", *single, *python, str(folder))


class Forker:
    """One process that has loaded tokenizer and template, and forks workers."""

    def __init__(self, process: asyncio.subprocess.Process, sock: socket.socket) -> None:
        self._process, self._socket = process, sock
        self._statuses: dict[int, asyncio.Future[int]] = {}
        self._loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # a child that was stopped right after its fork may hold the socket open: only the status of
        # the process shows that it has ended
        self.ended = asyncio.ensure_future(process.wait())
        self._listening = asyncio.ensure_future(self._listen())

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    async def start(cls, arguments: Sequence[str]) -> Forker:
        """Starts the process, which starts to load. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            ours.setblocking(False)
            null = asyncio.subprocess.DEVNULL
            process = await asyncio.create_subprocess_exec(
                *arguments,
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=null,
                stdout=null,
                stderr=null,
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return cls(process, ours)

    async def load(self, setup: Setup) -> None:
        """Sends the setup, and waits until all is loaded. Raises EngineError with the process's
        message where something cannot be loaded, and InternalError."""
        with contextlib.suppress(OSError):
            self._socket.send(contract.encode(setup))
        try:
            async with asyncio.timeout(LOAD_S):
                waited: set[asyncio.Future[Any]] = {self._loaded, self.ended}
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise EngineError(
                f"tokenizer and chat template were not loaded within {LOAD_S:g} s: look whether "
                "the disk that holds the engine answers"
            ) from None
        if not self._loaded.done():  # its last message may not have been read yet
            await asyncio.wait({self._loaded}, timeout=STATUS_S)
        if self._loaded.done():
            self._loaded.result()
            return
        code = await self.ended
        words = f"loading tokenizer and chat template ended with code {code}"
        if code < 0:
            name = signal.Signals(-code).name
            words = f"loading tokenizer and chat template took too much time or memory ({name})"
        raise EngineError(f"{words}: tokenizer.json or chat_template.jinja may be damaged")

    async def fork(self, nice: int, memory: int) -> WorkerProcess:
        """A new worker. Raises Gone where it has ended, and TimeoutError without an answer."""
        ours, theirs = socket.socketpair()
        try:
            ours.setblocking(False)
            order = contract.encode(contract.Fork(nice, memory))
            socket.send_fds(self._socket, [order], [theirs.fileno()])
            theirs.close()
            async with asyncio.timeout(HELLO_S):
                header, _ = await frames.receive_async(ours)
            pid = msgspec.msgpack.decode(header, type=contract.WorkerHello).pid
        except TimeoutError:  # before OSError, its base class
            ours.close()
            raise
        except (OSError, frames.Closed, msgspec.DecodeError):
            ours.close()
            raise Gone from None
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._statuses[pid] = asyncio.get_running_loop().create_future()
        return WorkerProcess(self, ours, pid)

    async def status_of(self, pid: int) -> int | None:
        """The exit status of a worker; None if it is not known in time."""
        future = self._statuses.get(pid)
        if future is None or self.ended.done():
            return None
        done, _ = await asyncio.wait({future}, timeout=STATUS_S)
        self._statuses.pop(pid, None)
        return future.result() if done else None

    def has_ended(self, pid: int) -> bool:
        """True if a worker is known to have ended, so that its pid may be reused."""
        future = self._statuses.get(pid)
        return future is None or future.done() or self.ended.done()

    def kill(self) -> None:
        """Ends the process and all that it forked: they are one process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """The same, and waits for it. May be called twice."""
        self.kill()
        await self.ended
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while data := await loop.sock_recv(self._socket, contract.MESSAGE):
                self._take(contract.decode_report(data))
        except (OSError, msgspec.DecodeError):
            pass
        finally:
            self._socket.close()

    def _take(self, report: contract.Report) -> None:
        if isinstance(report, contract.WorkerEnded):
            future = self._statuses.get(report.pid)
            if future is not None and not future.done():
                future.set_result(report.status)
        elif self._loaded.done():
            return
        elif isinstance(report, contract.ForkerReady):
            self._loaded.set_result(None)
        elif isinstance(report, contract.Unloadable):
            kind = EngineError if report.user else InternalError
            self._loaded.set_exception(kind(report.message))


class WorkerProcess:
    def __init__(self, forker: Forker, sock: socket.socket, pid: int) -> None:
        self._forker, self._socket, self.pid = forker, sock, pid
        self.has_grown = False  # it ends by itself

    def has_left(self) -> bool:
        try:
            return not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def is_stopped(self) -> bool:
        """True if the process was stopped, by SIGSTOP or a debugger."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return False
        return state in ("T", "t")

    async def ask(self, header: bytes, blobs: Sequence[Blobs]) -> tuple[bytes, list[bytes]]:
        """The answer to one job. Raises Gone where the process ends before."""
        try:
            await frames.send_async(self._socket, header, blobs)
            answer, found = await frames.receive_async(self._socket)
            self.has_grown = answer[-1:] == contract.GROWN_MARK
            return answer[:-1], found
        except (OSError, frames.Closed):
            raise Gone(await self._forker.status_of(self.pid)) from None

    def end(self) -> None:
        self._socket.close()
        if not self._forker.has_ended(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
