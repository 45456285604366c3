"""The processes that read prompts: one loads tokenizer and template, and forks the workers.

A worker does one job at a time; the system ends it where a job exceeds its CPU time. Knows the
socket's messages, forks, signals and limits; knows no API.
`python -m spark_engine.runtime.server.prompts.worker FOLDER FD`: FD is the socket to the parent.
"""

import contextlib
import ctypes
import gc
import os
import resource
import select
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import NoReturn

from spark_engine.errors import CapacityError, EngineError, RequestError, UserError
from spark_engine.runtime.server.engine_client.engine_folder import find_manifest
from spark_engine.runtime.server.engine_client.heap import resident
from spark_engine.runtime.server.prompts import contract, frames, limits
from spark_engine.runtime.server.prompts.handler import Handler, make_grammars
from spark_engine.runtime.server.prompts.text_files import read_text
from spark_engine.runtime.structured.matcher import Grammars

PR_SET_PDEATHSIG = 1  # of prctl.h
OUT_OF_MEMORY_FIRST = 500  # of oom_score_adj: a worker is killed before the engine


def main(folder: Path, number: int) -> None:
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    parent = socket.socket(fileno=number)
    with contextlib.suppress(OSError):
        try:
            handler = _load(folder, parent)
        except Exception as error:
            words = str(error) or type(error).__name__
            if short := isinstance(error, MemoryError):
                words = f"tokenizer and chat template take more than {limits.LOAD_MEMORY >> 20} MiB"
            user = short or isinstance(error, UserError | OSError)
            _tell(parent, contract.Unloadable(words[: limits.MOST_WORDS], user))
            return
        _tell(parent, contract.ForkerReady())
        _fork_on_demand(parent, handler)


def _load(folder: Path, parent: socket.socket) -> Handler:
    """Raises EngineError, and any error of the tokenizer's library."""
    _limit_memory(limits.LOAD_MEMORY)
    signal.setitimer(signal.ITIMER_PROF, limits.LOAD_CPU_S)
    found = find_manifest(folder)
    tokenizer, template = read_text(folder)
    grammars, known = None, None
    if tokenizer is not None and found is not None:
        known = found.limits.vocab, tuple(found.eos_token_ids)
        grammars = make_grammars(tokenizer, *known)
        warm_up(grammars)
    setup = contract.decode_order(parent.recv(contract.MESSAGE))
    assert isinstance(setup, contract.Setup)
    if found is not None and setup.info.build not in ("", found.fingerprint.all):
        raise EngineError(f"{folder} was built again while it was served: start the server again")
    if known != (setup.info.limits.vocab, tuple(setup.info.eos_token_ids)):
        grammars = None  # of another engine, as in tests
    handler = Handler(setup, tokenizer, template, grammars)
    signal.setitimer(signal.ITIMER_PROF, 0)
    gc.collect()
    gc.freeze()  # the workers' collections do not touch shared pages
    return handler


def warm_up(grammars: Grammars) -> None:
    """Does work now that the first grammar would wait for."""
    with contextlib.suppress(RequestError, CapacityError):
        grammars.check('start: "a"')
    grammars.forget()


def _fork_on_demand(parent: socket.socket, handler: Handler) -> None:
    """Forks a worker for each socket that it receives, and reports each worker that ended."""
    ours, wakeup = socket.socketpair()
    for end in (ours, wakeup):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
    while True:
        readable, _, _ = select.select([parent, ours], [], [])
        if ours in readable:
            ours.recv(4096)
            for pid, status in _ended():
                _tell(parent, contract.WorkerEnded(pid, status))
        if parent in readable:
            data, fds, _, _ = socket.recv_fds(parent, contract.MESSAGE, 1)
            if not data:
                return
            order = contract.decode_order(data)
            assert isinstance(order, contract.Fork)
            own = os.getpid()
            if os.fork() == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for end in (parent, ours, wakeup):
                    end.close()
                _work(socket.socket(fileno=fds[0]), order, handler, own)
            for fd in fds:
                os.close(fd)


def _ended() -> list[tuple[int, int]]:
    found = []
    with contextlib.suppress(ChildProcessError):
        while (pair := os.waitpid(-1, os.WNOHANG))[0]:
            found.append((pair[0], os.waitstatus_to_exitcode(pair[1])))
    return found


def _work(sock: socket.socket, order: contract.Fork, handler: Handler, parent: int) -> NoReturn:
    """A worker: does jobs until its socket closes, or it has grown."""
    code = 1
    try:
        _die_with_parent(parent)
        os.nice(order.nice)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(f"{OUT_OF_MEMORY_FIRST}")
        _limit_memory(order.memory)
        most = resident() + limits.GROWN
        frames.send(sock, contract.encode(contract.WorkerHello(os.getpid())), [])
        while _do(sock, handler, most):
            pass
        code = 0
    except (frames.Closed, OSError):
        code = 0
    finally:
        os._exit(code)


def _do(sock: socket.socket, handler: Handler, most: int) -> bool:
    """One job; False where the process now has more than `most` bytes, or running threads.

    The timer counts the time of all threads, and its signal ends the process.
    """
    header, blobs = frames.receive(sock)
    signal.setitimer(signal.ITIMER_PROF, contract.decode_job(header).cpu_s)
    answer, found = handler.handle(header, blobs)
    signal.setitimer(signal.ITIMER_PROF, 0)
    continues = resident() < most and threading.active_count() == 1
    frames.send(sock, answer + (contract.STAYS_MARK if continues else contract.GROWN_MARK), found)
    return continues


def _die_with_parent(parent: int | None = None) -> None:
    """Lets the system end the process with its parent; `parent` may have ended already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def _limit_memory(more: int) -> None:
    """Limits the address space to `more` bytes above the current ones."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + more
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _tell(parent: socket.socket, report: contract.Report) -> None:
    parent.send(contract.encode(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
