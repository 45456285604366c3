"""What a command is doing, on standard error: a line that changes on a terminal, lines elsewhere.

Knows terminals; knows nothing of the work.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

EVERY = 5.0  # seconds between two lines of one stage where there is no terminal
Say = Callable[[str], None]
Advance = Callable[[int, int], None]  # (done, all), in bytes or pieces
Step = Callable[[], None]


def ignore(done: int, total: int) -> None:
    """An `Advance` that shows nothing."""


class Progress:
    """Stages and how far each is. To be used in a `with`, which ends the line that is open.

    Without a stream nothing is shown.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._terminal = stream is not None and stream.isatty()
        self._text = self._shown = ""
        self._last = 0.0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def say(self, text: str) -> None:
        """A stage begins."""
        self.close()
        self._text = text
        self._show(text)

    def advance(self, done: int, total: int) -> None:
        """Reports the progress of the stage, in percent."""
        text = f"{self._text}: {100 * done // max(total, 1)} %"
        due = self._terminal or time.monotonic() - self._last >= EVERY
        if due and text != self._shown:
            self._show(text)

    @contextmanager
    def track(self, text: str, total: int) -> Iterator[Step]:
        """A stage of `total` pieces: what it gives is to be called after each of them."""
        done, start = 0, time.monotonic()

        def step() -> None:
            nonlocal done
            done += 1
            self.advance(done, total)

        self.say(text)
        yield step
        self._show(f"{text}: {done} of {total} in {time.monotonic() - start:.1f} s")

    def close(self) -> None:
        """Ends the line that is open; what is written next starts a new one."""
        if self._shown and self._terminal:
            self._write("\n")
        self._shown = ""

    def _show(self, text: str) -> None:
        self._shown, self._last = text, time.monotonic()
        if self._terminal:
            width = shutil.get_terminal_size().columns
            self._write(f"\r\x1b[2K{text[: width - 1]}")
        else:
            self._write(f"{text}\n")

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:  # its reader has ended, or its disk is full; the work continues
            self._stream = None
