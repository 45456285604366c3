"""The engine process: receives requests from a socket, steps the engine, sends its events.

Knows the engine's loop; knows no HTTP and no text. It ends when its standard input closes, which
means that its parent has ended.
"""

import contextlib
import gc
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import zmq

from spark_engine.command import BUG, USER
from spark_engine.engine_file import TOKENIZER, has_text
from spark_engine.errors import CapacityError, EngineError, RequestError, UserError
from spark_engine.progress import Progress
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.request import Event
from spark_engine.runtime.engine.trace import ENGINE, NoTrace, trace_of
from spark_engine.runtime.server.engine_client import ipc
from spark_engine.runtime.server.engine_client.dumps import ASK, STACKS, STATE, BlackBox
from spark_engine.runtime.server.engine_client.engine_folder import read_info
from spark_engine.runtime.server.engine_client.heap import trimmed_heap
from spark_engine.runtime.server.engine_client.memory_watch import MemoryWatch, watch_memory
from spark_engine.runtime.structured.matcher import Grammars

LINGER_MS = 1000  # for the last message at exit
TAKE_S = 0.002  # of reading requests between two steps; one of 16,000 tokens takes 0.2 ms


Opened = tuple[ipc.EngineInfo, Engine]
Actions = Sequence[Callable[[], None]]


class Replaced(EngineError):
    """The folder was rebuilt while it was being loaded: the next start finds it complete."""


class Worker:
    def __init__(
        self,
        socket: zmq.Socket[bytes],
        info: ipc.EngineInfo,
        engine: Engine,
        watch: MemoryWatch | None = None,
    ) -> None:
        """`watch` says whether the host's memory is short; None: it is not watched."""
        self._socket = socket
        self._info = info
        self._engine = engine
        self._watch = watch
        self._short = False

    def run(self) -> None:
        """Drain, step, send; sleeps in the poll while there is nothing to step."""
        self._report(())  # the first counters are sent before the server reports that it is ready
        self._send(ipc.Ready(self._info))
        while True:
            asked = self._drain()
            if self._watch is not None and self._watch.short != self._short:
                self._short = self._watch.short
                self._engine.save_memory(self._short)
            events: Sequence[Event] = ()
            started: Sequence[tuple[int, float]] = ()
            if not self._engine.idle:
                events, started = self._engine.step(), self._engine.started
            if events or started or asked:
                self._report(events, started)

    def _report(self, events: Sequence[Event], started: Sequence[tuple[int, float]] = ()) -> None:
        stats = ipc.summarise(self._engine.stats(), self._short)
        self._send(ipc.StepReport(list(events), stats, list(started)))

    def _drain(self) -> bool:
        """Handles the waiting commands, for TAKE_S at most while requests run: a burst of long
        prompts is read over several steps. Returns whether there was a command."""
        asked = False
        again, end = self._engine.check(), math.inf
        timeout = 0 if not self._engine.idle else None if again is None else int(1000 * again)
        if not self._engine.idle:
            end = time.monotonic() + TAKE_S
        while self._socket.poll(timeout):
            self._handle(*self._socket.recv_multipart())
            asked, timeout = True, 0
            if time.monotonic() > end:
                break
        return asked

    def _handle(self, data: bytes, *pixels: bytes) -> None:
        command = ipc.decode_command(data)
        if isinstance(command, ipc.Submit):
            try:
                self._engine.add(command.id, command.request(pixels))
            except (CapacityError, RequestError) as error:
                self._send(ipc.Refused(command.id, str(error)))
        elif isinstance(command, ipc.Cancel):
            self._engine.cancel(command.id)

    def _send(self, report: ipc.Report) -> None:
        self._socket.send(ipc.encode(report))


def serve(
    address: str, open_engine: Callable[[], Opened], save: Callable[[], None] = lambda: None
) -> int:
    """Runs the process until its parent ends or the engine fails; returns the exit code.

    `address` is `ipc://` and a path in a folder for it alone; `save` is called at the end.
    """
    path = Path(address.removeprefix("ipc://"))
    box = BlackBox(path.parent)
    box.open()
    last = [save]  # what is to be done before the process ends with its parent
    _leave_with_the_parent(path, last, box)
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)  # the HTTP process bounds what is in flight
    socket.linger = LINGER_MS
    socket.connect(address)
    try:
        opened = open_engine()
        box.describe = opened[1].state
        last.append(opened[1].settle)
        gc.freeze()  # what was loaded is permanent: a collection in a step need not scan it
        with trimmed_heap():
            Worker(socket, *opened, watch_memory()).run()
    except Exception as error:
        user = isinstance(error, UserError)
        if not user:
            with contextlib.suppress(OSError):  # a full disk must not suppress the last message
                traceback.print_exc()
            box.write_error(error)
        passing = isinstance(error, CapacityError | Replaced)
        words = str(error) if user else f"{type(error).__name__}: {error}"
        socket.send(ipc.encode(ipc.Failed(words, user, passing)))
        return USER if user else BUG
    finally:
        socket.close()
        context.term()
        save()
    return 0


def _leave_with_the_parent(path: Path, last: Actions, box: BlackBox) -> None:
    """Ignores signals to the process group: the parent handles them, drains, then ends us."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_watch_parent, args=(path, last, box), daemon=True).start()


def _watch_parent(path: Path, last: Actions, box: BlackBox) -> None:
    # a thread, because the loop may be in a long step when the parent sends, or ends
    with contextlib.suppress(OSError):
        while asked := os.read(0, 64):
            if ASK in asked:
                box.write()
    with contextlib.suppress(OSError):  # a parent that was killed did not remove its folder
        for left in (path, path.parent / STACKS, path.parent / STATE):
            left.unlink(missing_ok=True)
        path.parent.rmdir()
    for action in last:
        with contextlib.suppress(Exception):
            action()
    os._exit(0)


def open_engine(folder: Path, options: EngineOptions, trace: NoTrace) -> Opened:
    """The real engine. Raises EngineError or CapacityError."""
    info = read_info(folder)
    if has_text(folder):  # grammars are loaded in parallel with the engine
        grammars = Grammars.of(folder / TOKENIZER, info.limits.vocab, info.eos_token_ids)
        grammars.begin()
        options = replace(options, grammars=grammars)
    try:
        with Progress(sys.stderr) as shown:
            engine = Engine.open(folder, options, shown, trace)
    except EngineError as error:
        if replaced := _replaced(folder, info.build):
            raise replaced from error
        raise
    if replaced := _replaced(folder, info.build):
        engine.close()
        raise replaced
    sizes = engine.scheduler.sizes
    cache = {"cache_bytes": sizes.cache_bytes, "snapshots": sizes.snapshots}
    cache["disk_bytes"] = engine.disk_bytes
    return msgspec.structs.replace(info, **cache), engine


def _replaced(folder: Path, build: str) -> Replaced | None:
    """The error to raise if the folder's engine has changed."""
    with contextlib.suppress(EngineError, OSError):
        if read_info(folder).build == build:
            return None
    return Replaced(f"{folder} was built again, or moved, while it was being loaded: start again")


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m spark_engine.runtime.server.engine_client.worker ENGINE OPTIONS ADDRESS`.

    OPTIONS are the EngineOptions as JSON.
    """
    folder, given, address = sys.argv[1:] if arguments is None else arguments
    options = msgspec.json.decode(given, type=EngineOptions)
    trace = trace_of(options.profile, ENGINE, first=False)  # the HTTP process is
    return serve(address, lambda: open_engine(Path(folder), options, trace), trace.save)


if __name__ == "__main__":
    sys.exit(main())
