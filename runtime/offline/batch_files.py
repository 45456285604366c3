"""The files of a batch: OpenAI's lines of requests, and the lines of answers, which are appended.

Knows the format, and that any process may end at any byte. A line of answers begins with the id of
its request, which follows from the request's `custom_id`: so what is done is read from the file of
answers alone, in little memory. Knows no engine.
"""

import fcntl
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from spark_engine.errors import OptionError
from spark_engine.runtime.server.api.answers import Json

MOST_LINES = 1 << 20  # of a batch
MOST_ID = 512  # characters of a custom_id
AROUND = 64 << 10  # bytes of a line around its body
CHUNK = 1 << 20  # bytes that are read at once of a line that is too long
_HEAD = re.compile(rb'\{"id":"(batch_req_[0-9a-f]{24})",')
_START = 64  # bytes of a line, in which its head is


class _Named(msgspec.Struct):
    custom_id: str | None = None


class _Line(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Unsupported(msgspec.Struct):
    stream: Any = None
    background: Any = None


@dataclass(frozen=True)
class BatchLine:
    """One request. `problem`: why it is none; its other fields are as far as they could be read."""

    number: int
    custom_id: str | None
    url: str = ""
    body: bytes = b""
    problem: str = ""

    @property
    def ident(self) -> str:
        """The id of its line of answers: of its `custom_id`, or of its number where it has none."""
        name = f"line {self.number}" if self.custom_id is None else f"id {self.custom_id}"
        data = name.encode("utf-8", "surrogatepass")
        return f"batch_req_{blake2b(data, digest_size=12).hexdigest()}"

    def answer(self, response: Json | None, error: Json | None = None) -> bytes:
        """The line of its answer, or of its error, in OpenAI's form."""
        row = {"id": self.ident, "custom_id": self.custom_id, "response": response, "error": error}
        return msgspec.json.encode(row) + b"\n"


def read_lines(path: Path, most_body: int) -> Iterator[BatchLine]:
    """The requests of a file; blank lines are none. Raises OptionError where it is too long."""
    with path.open("rb") as file:
        for number, (head, size, _) in enumerate(_split(file, most_body + AROUND), 1):
            if number > MOST_LINES:
                raise OptionError(f"--batch {path} has more than {MOST_LINES} lines: split it")
            if size > len(head):
                most = f"at most {(most_body + AROUND) >> 10} KiB are read (--max-body-mib)"
                yield BatchLine(number, None, problem=f"the line has {size >> 10} KiB; {most}")
            elif text := head.removeprefix(b"\xef\xbb\xbf").strip():
                yield _read_line(number, text)


def _read_line(number: int, text: bytes) -> BatchLine:
    custom_id = None
    try:
        text.decode()  # JSON that is skipped is not checked otherwise
        custom_id = msgspec.json.decode(text, type=_Named).custom_id
        if custom_id is not None and len(custom_id) > MOST_ID:
            long, custom_id = len(custom_id), None
            raise ValueError(f"custom_id has {long} characters; at most {MOST_ID} are allowed")
        line = msgspec.json.decode(text, type=_Line)
        body = bytes(line.body)
        unsupported = msgspec.json.decode(body, type=_Unsupported)
        if line.method != "POST":
            raise ValueError(f"method is {line.method!r:.80}; it must be 'POST'")
        for name in ("stream", "background"):
            if getattr(unsupported, name):
                raise ValueError(f"body.{name} is on; a batch has whole answers: leave it out")
    except (ValueError, RecursionError) as error:
        wanted = 'a line is like {"custom_id": …, "method": "POST", "url": …, "body": {…}}'
        return BatchLine(number, custom_id, problem=f"line {number}: {error}; {wanted}")
    return BatchLine(number, custom_id, line.url, body)


class AnswerFile:
    """The file of answers, locked for this process. Each line is whole or, at the end, torn: a torn
    one is cut off, so that its request is answered again. `done`: the ids of the others."""

    def __init__(self, path: Path) -> None:
        """Raises OptionError where another process writes it, or it holds something else."""
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            self._lock()
            self.done = self._read()
        except BaseException:
            os.close(self._fd)
            raise

    def write(self, line: bytes) -> None:
        while line:
            line = line[os.write(self._fd, line) :]

    def close(self) -> None:
        os.close(self._fd)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            words = "another spark-run writes it: wait for that, or name another file"
            raise OptionError(f"--out {self._path}: {words}") from None

    def _read(self) -> set[str]:
        done, end = set[str](), 0
        with open(self._fd, "rb", closefd=False) as file:
            for number, (head, size, last) in enumerate(_split(file, _START), 1):
                whole, torn = _HEAD.match(head), last[-1:] != b"\n"
                if not (whole or (torn and _begins(head))) or not (torn or last[-2:] == b"}\n"):
                    words = "is no answer of a batch: name another file, or move this one away"
                    raise OptionError(f"--out {self._path}: line {number} {words}")
                if torn:
                    os.ftruncate(self._fd, end)
                    break
                assert whole is not None
                done.add(whole[1].decode())
                end += size
        return done


def _begins(head: bytes) -> bool:
    """Whether it may be the start of an answer, of which less than the id was written."""
    sample = b'{"id":"batch_req_' + b"0" * 24 + b'",'
    return len(head) < len(sample) and bool(_HEAD.match(head + sample[len(head) :]))


def _split(file: BinaryIO, most: int) -> Iterator[tuple[bytes, int, bytes]]:
    """(the first `most` bytes or less, the length, the last bytes) of each line."""
    while head := file.readline(most):
        size, last = len(head), head
        while last[-1:] != b"\n" and (more := file.readline(CHUNK)):
            size, last = size + len(more), last[-2:] + more
        yield head, size, last
