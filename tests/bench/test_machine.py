"""What else decides a figure: a card that is sampled, and one bench at a time."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from spark_engine.bench import machine
from spark_engine.bench.lock import alone
from spark_engine.errors import OptionError

SMI = """#!/bin/sh
case "$*" in
*"-i 3"*) echo "Other, 1, 2" ;;
*compute-apps*) echo "4711, /usr/bin/other, 1024" ;;
*"-i 0,3 -lms"*) echo "0, 1500, 1980, 350.5, 40, 90"; echo "3, 900, 1980, 80, 30, 0"
        echo "0, 1980, 1980, [N/A], 50, 100"; echo "cut"
        echo "0, 1700, 1980, 450.5, 60, 95"; exec sleep 60 ;;
*) echo "NVIDIA H200, 580.1, 700.00" ;;
esac
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "smi"
    path.write_text(SMI)
    path.chmod(0o755)
    monkeypatch.setattr(machine, "SMI", str(path))


def test_a_card_is_named_and_watched(smi: None) -> None:
    assert machine.card() == {"name": "NVIDIA H200", "driver": "580.1", "power_limit_w": 700.0}
    assert machine.processes("0") == ["4711, /usr/bin/other, 1024"]
    other = machine.card("3")
    assert other and other["name"] == "Other" and machine.processes("3") == ["Other, 1, 2"]
    with machine.Watch("0", "3") as watch:
        end = time.monotonic() + 60
        while watch.samples < 4 and time.monotonic() < end:
            time.sleep(0.01)
    found = watch.summary()
    assert [*found] == ["0", "3"] and found["3"]["sm_mhz"] == [900, 900, 900]
    assert found["0"] == {
        "sm_mhz": [1500, 1700, 1980],
        "sm_max_mhz": [1980, 1980, 1980],
        "watts": [350.5, 400.5, 450.5],
        "celsius": [40, 50, 60],
        "busy_percent": [90, 95, 100],
    }


def test_without_a_card_nothing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for missing in ("/nowhere/nvidia-smi", "/bin/false"):
        monkeypatch.setattr(machine, "SMI", missing)
        assert machine.card() is None and machine.processes("0") == []
        with machine.Watch("0") as watch:
            pass
        assert watch.summary() == {}
    assert machine.host()["cores"] == os.cpu_count()


HOLD = """
import sys, time
from pathlib import Path
from spark_engine.bench.lock import alone
with alone(Path(sys.argv[1]), False, print):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_two_benches_do_not_run_at_once(tmp_path: Path) -> None:
    path, said = tmp_path / "lock", list[str]()
    command = [sys.executable, "-c", HOLD, str(path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdin and other.stdout and other.stdout.readline() == "held\n"
        with pytest.raises(OptionError, match=f"process {other.pid}.*--wait"):
            with alone(path, False, said.append):
                raise AssertionError("not reached")
        released, stdin = threading.Event(), other.stdin

        def end() -> None:
            released.set()
            stdin.close()

        threading.Timer(0.3, end).start()
        with alone(path, True, said.append):
            assert released.is_set(), "the other had it still"
        other.stdin = None  # it is closed
    assert len(said) == 1 and f"process {other.pid}" in said[0]
    for _ in range(2):  # and it is released
        with alone(path, False, said.append):
            assert path.read_text() == str(os.getpid())


def test_another_users_lock_counts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a sticky folder the kernel refuses to open another user's file for writing."""
    real, path = os.open, tmp_path / "lock"
    path.write_text("4711")

    def opened(name: Path, flags: int, mode: int = 0o777) -> int:
        if flags & (os.O_CREAT | os.O_RDWR):
            raise PermissionError(13, "Permission denied")
        return real(name, flags, mode)

    monkeypatch.setattr(os, "open", opened)
    with alone(path, False, print), pytest.raises(OptionError, match="process 4711"):
        with alone(path, False, print):
            pass
