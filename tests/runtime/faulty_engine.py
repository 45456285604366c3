"""An engine process in which something goes wrong where and when a test says.

    python faulty_engine.py FOLDER SECONDS-OF-A-STEP ADDRESS

The real worker and `Engine` over executors without a model. A file `fault` in FOLDER holds a stage
and a kind; the first step to reach that stage removes the file, and the fault happens.
"""

import ctypes
import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spark_engine.errors import CapacityError, EngineError
from spark_engine.interface import Limits
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.server.engine_client import worker
from spark_engine.runtime.server.engine_client.ipc import EngineInfo
from tests.runtime import fake_executor
from tests.runtime.fake_executor import build_fake

LIMITS = Limits(max_seqs=4, max_context=768, pages=12, vocab=fake_executor.VOCAB)
STAGES = ("schedule", "_prepare", "_launch", "_collect", "_postprocess")
NAN = 59  # a prompt that begins with this token has no finite logits


def refuse() -> None:
    raise EngineError("weights.safetensors is damaged: build the engine again")


def lack() -> None:
    raise CapacityError("the engine takes 70 GiB, and 3 GiB are free")


def fail() -> None:
    raise RuntimeError("the step went wrong")


def hold() -> None:
    """Hangs with Python's lock, so that no thread of the process runs, and no signal ends it."""
    lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
    lock(mutex)
    lock(mutex)


KINDS: dict[str, Callable[[], object]] = {
    "raise": fail,
    "refuse": refuse,
    "lack": lack,
    "hang": lambda: time.sleep(1000),
    "hold": hold,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crash": lambda: faulthandler._sigsegv(),
    "exit": lambda: os._exit(7),
}


class Faults:
    """The file, and the stages that look at it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "fault"

    def at(self, stage: str) -> None:
        """The fault, if it is this stage's."""
        if not self._path.exists():
            return
        wanted, kind = json.loads(self._path.read_text())
        if wanted == stage:
            self._path.unlink()
            self._wait() if kind == "late" else KINDS[kind]()

    def _wait(self) -> None:
        """Until a file `go` is there, which is taken away."""
        go = self._path.with_name("go")
        while not go.exists():
            time.sleep(0.01)
        go.unlink()

    def before(self, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call with the stage before it."""

        def wrapped(*given: Any, **named: Any) -> Any:
            self.at(stage)
            return call(*given, **named)

        return wrapped


def order(folder: Path, stage: str, kind: str) -> None:
    """Called by a test: the fault that is to happen next."""
    part = folder / "fault.part"
    part.write_text(json.dumps([stage, kind]))
    part.replace(folder / "fault")


def open_faulty(folder: Path, step_s: float) -> worker.Opened:
    faults = Faults(folder)
    faults.at("load")
    engine = Engine(build_fake(LIMITS, (1, 4), (1,), lazy=False), EngineOptions(seed=1))
    loop = engine._loop
    loop.scheduler.schedule = faults.before("schedule", loop.scheduler.schedule)  # type: ignore[method-assign]
    for stage in STAGES[1:]:
        setattr(loop, stage, faults.before(stage, getattr(loop, stage)))
    step, sampled = engine.step, loop._postprocess

    def slow_step() -> Any:
        time.sleep(step_s)
        return step()

    def poisoned(collected: Any) -> Any:
        for one in collected:
            for row, seq in enumerate(one.batch.seqs):
                if seq.request.prompt[0] == NAN:
                    one.outputs["ok"][row] = 0
        return sampled(collected)

    engine.step, loop._postprocess = slow_step, poisoned  # type: ignore[method-assign]
    return EngineInfo("faulty", LIMITS, fake_executor.EOS), engine


if __name__ == "__main__":
    folder, step_s, address = sys.argv[1:]
    sys.exit(worker.serve(address, lambda: open_faulty(Path(folder), float(step_s))))
