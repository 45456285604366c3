"""What an operator or a bad machine does: stopped and killed processes, full and read-only disks,
an engine folder that is replaced.

Honest requests may end in a clear error meanwhile, and must be answered afterwards.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.repository import ROOT
from tests.soak.attacks.attack import CHAT, TEXT, Attack, Attacker
from tests.soak.attacks.grammars import slow_schema, tools, walks
from tests.soak.attacks.processes import Server, children, family, left_over

CHECKPOINT = ROOT / "models" / "tiny" / "checkpoint"
STOPPED_S = 10.0
WATCHDOG_S = 5  # --watchdog-s of the server
DEATHS = 20
OPTIONS = ("--watchdog-s", str(WATCHDOG_S), "--restarts", "60", "--dumps", "dumps")


def _stop(at: Attacker, pids: list[int]) -> None:
    """They are stopped for a while; where one of them is ended meanwhile, that is well too."""
    at.expect(bool(pids), "there is no such process")
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    for pid in pids:
        try:
            os.kill(pid, signal.SIGCONT)
            at.count("continued")
        except ProcessLookupError:
            at.count("was ended")
    _recovers(at)


def _recovers(at: Attacker, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if at.server.is_healthy() and at.post(TEXT, {"prompt": "a", "max_tokens": 1}).status == 200:
            return
        time.sleep(0.2)
    at.expect(False, f"it was not well again within {seconds:g} s")


def stop_engine(at: Attacker) -> None:
    """SIGSTOP of the engine process; the watchdog ends it."""
    engine = at.server.engine
    _stop(at, [engine] if engine else [])


def stop_workers(at: Attacker) -> None:
    """SIGSTOP of all processes that read prompts."""
    _stop(at, at.server.text_workers)


def stop_forker(at: Attacker) -> None:
    """SIGSTOP of the process that forks them, while they die."""
    forker, workers = at.server.forker, at.server.text_workers
    if forker is None:
        at.expect(False, "there is no such process")
        return
    os.kill(forker, signal.SIGSTOP)
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    _stop(at, [forker])


def kill_workers(at: Attacker) -> None:
    """SIGKILL of those that read prompts, again and again, and of the process that forks them."""
    for _ in range(10):
        for pid in at.server.text_workers:
            try:
                os.kill(pid, signal.SIGKILL)
                at.count("killed")
            except ProcessLookupError:
                pass
        time.sleep(0.3)
    forker = at.server.forker
    if forker is not None:
        os.kill(forker, signal.SIGKILL)
    _recovers(at)


def deaths(at: Attacker) -> None:
    before = at.server.descriptors()
    for _ in range(DEATHS):
        engine = at.server.engine
        if engine is None:
            at.expect(False, "there is no engine process")
            return
        os.kill(engine, signal.SIGKILL)
        end = time.monotonic() + 60
        while at.server.engine in (None, engine) or not at.server.is_healthy():
            time.sleep(0.1)
            if time.monotonic() > end:
                at.expect(False, "no other engine process came")
                return
        at.count("killed")
    _recovers(at)
    now, descendants = at.server.descriptors(), children(at.server.pid)
    at.expect(now <= before + 8, f"{before} descriptors became {now}")
    at.expect(len(descendants) <= 2, f"children: {descendants}")


def full_disk(at: Attacker) -> None:
    """The disk of dumps and of the log is full, then it may not be written; the engine dies."""
    dumps = at.server.folder / "dumps"
    for remount in (None, "remount,ro"):
        if remount is None:
            fill = dumps / "full"
            with fill.open("wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError:
                    at.count("full")
        elif os.path.ismount(dumps):
            subprocess.run(["mount", "-o", remount, str(dumps)], check=True)
            at.count("read-only")
        engine = at.server.engine
        assert engine is not None
        os.kill(at.server.pid, signal.SIGUSR1)
        time.sleep(1)
        os.kill(engine, signal.SIGSTOP)
        time.sleep(WATCHDOG_S + 3)
        _recovers(at)
    if os.path.ismount(dumps):
        subprocess.run(["mount", "-o", "remount,rw", str(dumps)], check=True)
    (dumps / "full").unlink(missing_ok=True)


def replaced(at: Attacker) -> None:
    """An engine with other limits is built over the folder that is served."""
    folder = at.server.folder / "engine"
    other = folder.with_name("other")
    command = [sys.executable, "-P", "-m", "spark_engine.builder.cli", str(CHECKPOINT)]
    command += ["-o", str(other), "--decode", "1", "--prefill", "64", "--max-context", "128"]
    subprocess.run([*command, "--no-record"], check=True, capture_output=True)
    folder.rename(folder.with_name("old"))
    other.rename(folder)
    for _ in range(5):
        at.post(TEXT, {"prompt": "a", "max_tokens": 1})
    at.only(200)


def _replaced_dies(at: Attacker) -> None:
    """The same, then the engine process is killed: exit code 1 and the reason."""
    replaced(at)
    engine = at.server.engine
    assert engine is not None
    os.kill(engine, signal.SIGKILL)
    _ends(at, at.server, 1)
    words = "was built again while it was served"
    at.expect(words in at.server.log.read_text(), f"the log does not say that it {words}")


def _ends(at: Attacker, server: Server, code: int, seconds: float = 45.0) -> None:
    """The process ends with this code, and leaves none."""
    descendants = family(server.pid)[1:]
    try:
        found = server.process.wait(seconds)
    except subprocess.TimeoutExpired:
        at.expect(False, f"it did not end within {seconds:g} s")
        return
    at.count(f"exit {found}")
    at.expect(found == code, f"exit code {found}")
    at.expect(not left_over(descendants), f"processes are left: {left_over(descendants, 0)}")


def wedged(at: Attacker) -> None:
    """SIGTERM while those that read prompts are stopped or busy."""
    turn = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    rows = [{**turn, "tools": tools(schema), "tool_choice": "required"} for schema in walks()]
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": slow_schema(1)}}
    rows += [{**turn, "response_format": form}] * 4

    def send(body: object) -> None:
        at.post(CHAT, body, patience_s=1)

    at.all(send, rows, 20)
    for pid in at.server.text_workers:
        os.kill(pid, signal.SIGSTOP)
    descendants = family(at.server.pid)[1:]
    begin = time.monotonic()
    at.server.process.terminate()
    _ends(at, at.server, 0)
    at.count(f"after {time.monotonic() - begin:.0f} s")
    at.expect(not left_over(descendants), f"processes are left: {left_over(descendants, 0)}")


def mount(folder: Path, size: str = "1m") -> bool:
    """A small file system at `folder`; whether that may be done here."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


ATTACKS = (
    Attack("SIGSTOP of the engine, 10 s", stop_engine, "it is ended; well again", faults=True),
    Attack("SIGSTOP of prompt workers, 10 s", stop_workers, "well again", faults=True),
    Attack("SIGSTOP of their forker, 10 s", stop_forker, "well again", faults=True),
    Attack("SIGKILL of prompt workers", kill_workers, "well again", faults=True),
    Attack("full and read-only disk of dumps", full_disk, "well again", faults=True),
    Attack("20 engine deaths", deaths, "well again, nothing leaks", faults=True),
)
LAST = (
    Attack("an engine folder that is replaced", _replaced_dies, "exit code 1", faults=True),
    Attack("SIGTERM with wedged workers", wedged, "exit code 0 in time", faults=True),
)
