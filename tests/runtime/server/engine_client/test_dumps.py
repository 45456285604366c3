"""What a dump holds, and what happens where none can be written."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spark_engine.interface import Limits
from spark_engine.runtime.engine.engine import Engine
from spark_engine.runtime.engine.request import Request, SamplingParams
from spark_engine.runtime.server.engine_client.dumps import (
    KEPT,
    NAME,
    STACKS,
    STATE,
    BlackBox,
    Dumps,
)
from spark_engine.runtime.server.engine_client.dumps import read_black_box as read
from tests.runtime.fake_executor import build_fake

FALLS = """
import os, signal, sys, time
from pathlib import Path
from spark_engine.runtime.server.engine_client.dumps import BlackBox
box = BlackBox(Path(sys.argv[1]))
box.open()
def stack_of_this_test():
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGSEGV)
stack_of_this_test()
"""


def _write(dumps: Dumps, words: str, engine: dict[str, str]) -> Path:
    async def write() -> Path:
        return dumps.write(words, engine, {"engine_client": 1})

    return asyncio.run(write())


def test_a_dump_says_what_both_processes_did(tmp_path: Path) -> None:
    path = _write(Dumps(tmp_path), "it hung", {STATE: '{"a": 1}'})
    text = path.read_text()
    assert text.startswith("it hung\n") and '{"a": 1}' in text and '{"engine_client":1}' in text
    assert "engine process: stacks ==\n(none:" in text
    assert "in write" in text, "the stack of this very thread"
    assert path.stat().st_mode & 0o777 == 0o600, "only the owner may read it"


def test_old_dumps_go_and_other_files_stay(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    for i in range(KEPT + 3):
        old = tmp_path / f"{NAME}{i:02}.txt"
        old.touch()
        os.utime(old, (i, i))
    new = _write(Dumps(tmp_path), "again", {})
    left = {path.name for path in tmp_path.iterdir()}
    wanted = {f"{NAME}{i:02}.txt" for i in range(4, KEPT + 3)}
    assert left == wanted | {"notes.txt", new.name} and len(left) == KEPT + 1


def test_where_none_can_be_written_an_error_says_so(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        _write(Dumps(tmp_path / "none"), "it hung", {})


def test_a_process_that_falls_leaves_its_stacks(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-P", "-c", FALLS, str(tmp_path)])
    assert done.returncode == -11
    (text,) = read(tmp_path).values()
    assert text.count("in stack_of_this_test") == 2, "once when asked, once as it fell"
    assert "Segmentation fault" in text
    assert read(tmp_path) == {}, "it was taken out"


BUSY = """
import sys, threading
from pathlib import Path
from spark_engine.runtime.server.engine_client.dumps import BlackBox
box = BlackBox(Path(sys.argv[1]))
box.open()
def deep(more):
    return deep(more - 1) + sum(i for i in range(3)) if more else 0
def works():
    started.release()
    while True:
        deep(20)
started = threading.Semaphore(0)
for _ in range(4):
    threading.Thread(target=works, daemon=True).start()
for _ in range(4):
    started.acquire()
for _ in range(100):
    box.write()
"""


def test_a_process_is_asked_while_it_works(tmp_path: Path) -> None:
    """Its stacks are read while none of them changes: a signal's would end it within a second."""
    done = subprocess.run([sys.executable, "-P", "-c", BUSY, str(tmp_path)])
    found = read(tmp_path)
    assert done.returncode == 0 and found[STACKS].count("in works") == 4 * 100 and STATE in found


def test_the_state_of_an_engine_in_mid_step(tmp_path: Path) -> None:
    engine = Engine(build_fake(Limits(2, 64, 8, 61), (1, 2), (1,)))
    for _ in range(3):
        engine.submit(Request((5, 6, 7), SamplingParams(max_tokens=4, seed=1)))
    for _ in range(2):
        engine.step()
    box = BlackBox(tmp_path)
    box.describe = engine.state
    box.write()
    text = read(tmp_path)[STATE]
    assert '"name":"slot","size":2,"free":0' in text
    assert '"running":[0,1],"waiting":[2]' in text
    assert '"family":"decode","bucket":' in text and '"id":2,"status":"waiting"' in text
    assert "5,6,7" not in text, "no token of anybody"


def test_a_state_that_changes_while_it_is_read_is_read_again(tmp_path: Path) -> None:
    box, calls = BlackBox(tmp_path), 0

    def describe() -> object:
        nonlocal calls
        calls += 1
        if calls < 3:
            raise RuntimeError("dictionary changed size during iteration")
        return {"calls": calls}

    box.describe = describe
    box.write()
    assert read(tmp_path)[STATE] == '{"calls":3}'
    box.describe = lambda: 1 / 0
    box.write()
    assert "ZeroDivisionError" in read(tmp_path)[STATE]
    (tmp_path / f"{STATE}.part").mkdir()
    box.write()  # nowhere to write: nothing is raised
    assert STACKS not in read(tmp_path)
