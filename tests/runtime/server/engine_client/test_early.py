"""An engine process without orders: it takes them once, and ends with the pipe to it."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq.asyncio

from spark_engine import engine_file
from spark_engine.errors import EngineError
from spark_engine.runtime.server.engine_client import early, engine_process, worker

SCRIPT = """
import os, sys
from spark_engine.runtime.server.engine_client.early import read_orders
path, *words = read_orders()
with open(path, "a") as file:
    print(*words, os.environ.get("GIVEN"), os.environ.get("BEFORE"), file=file)
sys.stdin.read()
"""


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> tuple[early.EarlyProcess, subprocess.Popen[bytes]]:
    """A process that began with another environment."""
    monkeypatch.setattr(early, "EARLY", (sys.executable, "-c", SCRIPT))
    monkeypatch.setenv("BEFORE", "1")
    made = early.EarlyProcess()
    monkeypatch.delenv("BEFORE")
    monkeypatch.setenv("GIVEN", "two\nlines")
    assert made._process is not None
    return made, made._process


Waiting = tuple[early.EarlyProcess, subprocess.Popen[bytes]]


def test_it_gets_arguments_and_the_environment_of_now_once(
    tmp_path: Path, waiting: Waiting
) -> None:
    one, process = waiting
    assert one.take([str(tmp_path / "out"), "a b"]) is process
    assert one.take(["again"]) is None
    one.close()  # it is another one's now
    process.communicate(timeout=60)  # closes its standard input
    assert process.returncode == 0
    assert (tmp_path / "out").read_text() == "a b two\nlines None\n"


def test_it_ends_without_orders_when_its_parent_does(tmp_path: Path, waiting: Waiting) -> None:
    _, process = waiting
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_one_that_is_closed_or_has_ended_takes_no_orders(waiting: Waiting) -> None:
    one, process = waiting
    process.kill()
    process.wait(60)
    assert one.take(["path"]) is None
    other = early.EarlyProcess()
    assert (left := other._process) is not None
    other.close()
    assert left.returncode == -9 and other.take(["path"]) is None


@pytest.mark.parametrize("ended", [False, True])
async def test_an_engine_process_is_the_early_one_or_starts(
    tmp_path: Path, waiting: Waiting, ended: bool
) -> None:
    one, process = waiting
    if ended:
        process.kill()
    context = zmq.asyncio.Context()
    code = "import sys; open(sys.argv[1], 'a').write('started'); sys.stdin.read()"
    command = (sys.executable, "-P", "-c", code, str(tmp_path / "out"))
    assert len(engine_process.WORKER) == 4
    made = engine_process.EngineProcess(command, context, lambda data: None)
    if ended:
        process.wait(60)
    await made.start(one)
    assert (made.pid == process.pid) != ended
    for _ in range(6000):
        if (tmp_path / "out").exists() and (tmp_path / "out").read_text():
            break
        await asyncio.sleep(0.01)
    assert await made.close(patience_s=60) and made.gone
    text = (tmp_path / "out").read_text()
    assert text == "started" if ended else text.startswith("ipc://")
    assert not os.path.exists(f"/proc/{made.pid}")
    context.term()


@pytest.mark.parametrize(
    ("target", "fails", "held"),
    [
        ("sm_90a", "", 1),
        ("cpu", "", 0),
        (None, "", 1),
        ("sm_90a", "cuInit", 0),
        ("cpu", "cuInit", 0),
    ],
)
def test_it_holds_a_context_for_an_engine_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str | None, fails: str, held: int
) -> None:
    """Before it has orders. Without a GPU, or a manifest, it gets to the worker, which says why."""
    pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")
    from spark_engine.device import cuda_driver
    from tests.fake_driver import FakeDriver

    driver = FakeDriver(fails=(fails,))
    monkeypatch.setattr(cuda_driver, "driver", driver)

    def manifest(folder: Path) -> SimpleNamespace:
        if target is None:
            raise EngineError("no engine is there")
        assert folder == tmp_path
        return SimpleNamespace(target=target)

    def orders() -> list[str]:
        assert driver.held["cuDevicePrimaryCtxRetain"] == (not fails)
        return [str(tmp_path), "{}", "ipc://x"]

    given: list[list[str]] = []
    monkeypatch.setattr(engine_file, "read_manifest", manifest)
    monkeypatch.setattr(early, "read_orders", orders)
    monkeypatch.setattr(worker, "main", lambda words: given.append(words) or 7)
    assert early.main() == 7 and given == [[str(tmp_path), "{}", "ipc://x"]]
    assert driver.held["cuDevicePrimaryCtxRetain"] == held
