"""Standard error as JSON lines: every line that the log did not write becomes a record.

With `--log-format json` every line must be one JSON object, also those of libraries, of the engine
process and its ranks, of crashes, and of the loading progress. All of them write to descriptor 2,
which is therefore a pipe that a thread reads. Knows descriptors and lines; knows no option.
"""

import contextlib
import fcntl
import logging
import os
import re
import select
import sys
import threading
from collections.abc import Iterable, Iterator

import msgspec

from spark_engine.runtime.server.operation.logs import JsonFormatter, LogFormat

OWN = 2  # the descriptor of standard error
LONGEST = 64 << 10  # bytes of one record: longer ones are split
PIPE = 1 << 20  # bytes that a library may write while it holds the GIL
QUIET_S = 0.1  # after which a traceback is complete
END_S = 2.0  # at the end, for output of other processes
LOGGER = "stderr"
CRASH = re.compile(
    r"Traceback \(most recent call last\)|Exception (in thread|ignored in)|Fatal Python error"
    r"|terminate called|thread '.*' panicked|--- Logging error ---|\*\*\* "
)
# After such a line a traceback belongs to the crash before it.
CHAINED = re.compile("During handling of|The above exception|Exception in thread|--- Logging")
_WORSE = (  # the first is also the last line of a command that fails
    (re.compile(r"^spark-[a-z]+: |error\b", re.I), logging.ERROR),
    (re.compile(r"warning\b", re.I), logging.WARNING),
)


@contextlib.contextmanager
def standard_error(form: LogFormat) -> Iterator[None]:
    """Within it, with JSON as `form`, this process and its children write JSON lines to standard
    error. Does nothing where `sys.stderr` is not descriptor 2, as in a test."""
    if form is not LogFormat.JSON or not _is_own():
        yield
        return
    pipe = _Pipe()
    try:
        yield
    finally:
        pipe.close()


def _is_own() -> bool:
    try:
        return sys.stderr.fileno() == OWN
    except (AttributeError, OSError, ValueError):  # none, closed, or not a file
        return False


class _Pipe:
    """Descriptor 2 until `close`."""

    def __init__(self) -> None:
        sys.stderr.flush()
        self._real = os.dup(OWN)
        self._reading, writing = os.pipe()
        with contextlib.suppress(OSError):  # over this user's limit
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE)
        os.dup2(writing, OWN)
        os.close(writing)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._read, name="stderr", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Writes the rest, and restores the descriptor."""
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os.dup2(self._real, OWN)
        self._closing.set()
        self._thread.join(END_S)
        if not self._thread.is_alive():
            os.close(self._reading)
            os.close(self._real)

    def _read(self) -> None:
        records = Records()
        while True:
            closing = self._closing.is_set()
            if not select.select([self._reading], [], [], QUIET_S)[0]:
                self._write(records.end())
                if closing:
                    break
            elif data := os.read(self._reading, LONGEST):
                self._write(records.push(data))
            else:
                break
        self._write(records.last())

    def _write(self, lines: Iterable[str]) -> None:
        for line in lines:
            data = line.encode("utf-8", "replace") + b"\n"
            with contextlib.suppress(OSError):  # it is not read, or the disk is full
                while data:
                    data = data[os.write(self._real, data) :]


class Records:
    """Bytes of standard error as JSON lines: a record for each line, one for a whole crash."""

    def __init__(self) -> None:
        self._rest = b""
        self._crash: list[str] = []
        self._format = JsonFormatter().format

    def push(self, data: bytes) -> Iterator[str]:
        """The lines that are complete. Those that are records of the log stay as they are."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        while len(self._rest) > LONGEST:
            lines.append(self._rest[:LONGEST])
            self._rest = self._rest[LONGEST:]
        for line in lines:
            yield from self._line(line)

    def end(self) -> Iterator[str]:
        """No output for QUIET_S: a crash is complete."""
        crash, self._crash = self._crash, []
        if crash:
            yield self._record("\n".join(crash).rstrip(), logging.ERROR)

    def last(self) -> Iterator[str]:
        """The end of the output: a last line may lack its line break."""
        rest, self._rest = self._rest, b""
        yield from self._line(rest)
        yield from self.end()

    def _line(self, line: bytes) -> Iterator[str]:
        text = line.decode("utf-8", "replace").rstrip("\r")
        if _is_record(line):
            yield from self.end()
            yield text
        elif self._crash or CRASH.match(text):
            before = next((line for line in reversed(self._crash) if line), "")
            if CRASH.match(text) and not CHAINED.match(before):
                yield from self.end()
            self._crash.append(text)
            if sum(map(len, self._crash)) > LONGEST:
                yield from self.end()
        elif text.strip():
            found = (level for pattern, level in _WORSE if pattern.search(text))
            yield self._record(text, next(found, logging.INFO))

    def _record(self, text: str, level: int) -> str:
        return self._format(logging.LogRecord(LOGGER, level, "", 0, "%s", (text,), None))


def _is_record(line: bytes) -> bool:
    """True if the log wrote the line, here or in a process that logs as JSON too."""
    if not line.startswith(b"{"):
        return False
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return isinstance(row, dict) and {"time", "level", "logger", "message"} <= row.keys()
