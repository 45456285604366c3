"""A server that a bench starts: it does not outlive the bench."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from spark_engine.bench.target import started

SERVER = """#!/bin/sh
echo $$ > {folder}/pid
echo serving x on http://a:1 >&2
exec sleep 60
"""


def test_a_bench_that_is_ended_ends_its_server(tmp_path: Path, monkeypatch: Any) -> None:
    script, before = tmp_path / "server", signal.getsignal(signal.SIGTERM)
    script.write_text(SERVER.format(folder=tmp_path))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(SystemExit, match="143"), started(tmp_path, (), print) as url:
        assert url == "http://a:1"
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    assert signal.getsignal(signal.SIGTERM) == before
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
