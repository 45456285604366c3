"""The process ends, whatever in it does not."""

import asyncio
import subprocess
import sys
import time

import pytest

from spark_engine.runtime.server.process import leaving

CODE = """
import asyncio, threading, time
from spark_engine.runtime.server.process import leaving

async def serve():
    {start}
    return 7

leaving.PATIENCE_S = 0.2
raise SystemExit(leaving.run(serve()))
"""
WEDGED = {
    "a thread": "threading.Thread(target=time.sleep, args=(600,), name='wedged').start()",
    "a thread of the loop": "asyncio.ensure_future(asyncio.to_thread(time.sleep, 600)); "
    "await asyncio.sleep(0.1)",
    "the loop": "leaving.leave_later(0.2, lambda: 7); time.sleep(600)",
}


@pytest.mark.parametrize("what", WEDGED)
def test_nothing_keeps_the_process(what: str) -> None:
    begin = time.monotonic()
    code = CODE.format(start=WEDGED[what])
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert done.returncode == 7, done.stderr
    assert time.monotonic() - begin < 60


def test_threads_that_end_are_waited_for() -> None:
    async def serve() -> int:
        await asyncio.to_thread(time.sleep, 0.01)
        return 3

    assert leaving.run(serve()) == 3
