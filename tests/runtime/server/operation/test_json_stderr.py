"""With --log-format json each line of standard error is one JSON object, whatever writes it."""

import json
import subprocess
import sys
from typing import Any

import pytest

from spark_engine.runtime.server.operation import json_stderr as module
from spark_engine.runtime.server.operation.json_stderr import Records, standard_error
from spark_engine.runtime.server.operation.logs import LogFormat

# What a process may write: the log, a progress line, a child, a thread that fails, C code, a
# warning, bytes that are no text, a long line, and a traceback at its end.
WRITER = """
import logging, os, subprocess, sys, threading, time, warnings
from spark_engine.command import command
from spark_engine.errors import OptionError
from spark_engine.runtime.server.operation.json_stderr import standard_error
from spark_engine.runtime.server.operation.logs import LogFormat, LogLevel, set_up

def fails():
    raise ValueError("in a thread")

with standard_error(LogFormat.JSON), command("spark-run"):
    print("before the log is set up", file=sys.stderr)
    set_up(LogFormat.JSON, LogLevel.ERROR)
    logging.getLogger("x").error("of the log\\nin two lines")
    subprocess.run([sys.executable, "-c", "raise KeyError('of a child')"])
    thread = threading.Thread(target=fails)
    thread.start()
    thread.join()
    time.sleep(0.5)
    os.write(2, b"from C, with \\xff and a \\r\\n\\n")
    logging.getLogger("x").error("a name: %s", os.fsdecode(b"\\xff"))
    warnings.warn("a Python warning")
    os.write(2, b"x" * 200_000 + b"\\n")
    {last}
"""
LASTS = {
    "raise OptionError('--port is wrong')": (2, "spark-run: --port is wrong"),
    "raise RuntimeError('a bug')": (1, "RuntimeError: a bug"),
    "sys.stderr.write('no line break at the end'); sys.exit(0)": (0, "no line break at the end"),
}


def _rows(lines: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("last", LASTS)
def test_each_line_is_one_object_whatever_writes_it(last: str) -> None:
    code = WRITER.replace("{last}", last)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    lines = done.stderr.decode().splitlines()
    rows = _rows(lines)
    wanted, words = LASTS[last]
    assert done.returncode == wanted and done.stdout == b""
    assert all({"time", "level", "logger", "message"} <= row.keys() for row in rows)
    said = [row["message"] for row in rows]
    assert said[0] == "before the log is set up"
    assert "of the log\nin two lines" in said and words in said[-1]
    (child,) = [row for row in rows if "KeyError" in row["message"]]
    assert child["message"].startswith("Traceback") and child["message"].endswith("'of a child'")
    (thread,) = [row for row in rows if "in a thread" in row["message"]]
    assert thread["message"].startswith("Exception in thread")
    assert {child["level"], thread["level"]} == {"error"}
    assert "from C, with \N{REPLACEMENT CHARACTER} and a " in said
    assert any("a name: " in words for words in said)
    assert sum(words.count("x") for words in said if set(words) == {"x"}) == 200_000
    assert rows[-1]["level"] == ("error" if wanted else "info")


def test_text_and_a_stream_that_is_no_descriptor_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_Pipe", lambda: pytest.fail("a pipe is made"))
    with standard_error(LogFormat.TEXT), standard_error(LogFormat.JSON):
        pass  # pytest's own stream has another descriptor, or none
    monkeypatch.setattr(sys, "stderr", None)
    with standard_error(LogFormat.JSON):
        pass


def test_a_line_is_a_record_and_a_crash_is_one_with_all_its_lines() -> None:
    records = Records()

    def push(data: bytes) -> list[tuple[str, str]]:
        return [(row["level"], row["message"]) for row in _rows(list(records.push(data)))]

    assert push(b"loading x\nopening 8 buc") == [("info", "loading x")]
    assert push(b"kets\n\n \nw.py:1: UserWarning: y\n") == [
        ("info", "opening 8 buckets"),
        ("warning", "w.py:1: UserWarning: y"),
    ]
    assert push(b"Traceback (most recent call last):\n  File\n\n") == []
    own = b'{"time":"t","level":"info","logger":"l","message":"m"}\n'
    assert push(b"ValueError: 1\n\nDuring handling of the above exception\n\n") == []
    again = push(b"Traceback (most recent call last):\nKeyError: 2\nException in thread T:\n")
    assert [words.count("Traceback") for _, words in again] == [2], "chained ones are one record"
    assert push(b"Traceback (most recent call last):\n") == []
    (crash, line) = _rows(list(records.push(b"ValueError: 1\n" + own)))
    assert crash["message"].endswith("last):\nValueError: 1") and line["message"] == "m"
    others = ['{"a": 1}', "{broken", "[1]"]
    assert push("\n".join([*others, ""]).encode()) == [("info", line) for line in others]
    assert push(b"Fatal Python error: Segmentation fault\n\nCurrent thread") == []
    (fatal,) = _rows(list(records.last()))
    assert fatal["level"] == "error" and fatal["message"].endswith("Current thread")


TWICE = """
import os, sys
from spark_engine.runtime.server.operation.json_stderr import standard_error
from spark_engine.runtime.server.operation.logs import LogFormat
before = len(os.listdir("/proc/self/fd"))
with standard_error(LogFormat.JSON):
    print("inside", file=sys.stderr)
assert len(os.listdir("/proc/self/fd")) == before
print("outside", file=sys.stderr)
"""


def test_the_descriptor_is_restored() -> None:
    done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=60)
    first, second = done.stderr.splitlines()
    assert json.loads(first)["message"] == "inside" and second == "outside"
