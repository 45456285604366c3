"""What a chat shows on the terminal: streamed answers as Markdown, reasoning dim, our notes.

Knows rich. A model's text never reaches the terminal as control sequences.
"""

import time
from collections.abc import Callable

from rich.console import Console, RenderableType
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

from spark_engine.runtime.cli.terminal.printable import printable

EVERY = 0.07  # seconds between two updates of the part that still grows
FENCES = ("```", "~~~")


def whole_blocks(text: str) -> int:
    """The number of characters at the start that later text cannot change.

    A block ends before a line that follows a blank one and is not indented, outside of code.
    """
    end = at = 0
    fence, blank = "", False
    for line in text.splitlines(keepends=True):
        bare = line.strip()
        if fence:
            closed = bare.startswith(fence) and not bare.strip(fence[0])
            fence = "" if closed else fence
        else:
            if blank and bare and not line[0].isspace():
                end = at
            if bare.startswith(FENCES):
                fence = bare[: len(bare) - len(bare.lstrip(bare[0]))]
        blank = not bare
        at += len(line)
    return end


class Stream:
    """A text that grows: complete blocks are printed once, the last one is redrawn."""

    def __init__(self, console: Console, render: Callable[[str], RenderableType]) -> None:
        self._console, self._render = console, render
        self._text, self._last = "", 0.0
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def push(self, text: str) -> None:
        self._text += text
        if cut := whole_blocks(self._text):
            self._print(self._text[:cut])
            self._text = self._text[cut:]
        elif time.monotonic() - self._last < EVERY:
            return
        self._last = time.monotonic()
        self._live.update(self._tail(), refresh=True)

    def close(self) -> None:
        self._live.update(Text(""), refresh=True)
        self._live.stop()
        if self._text.strip():
            self._print(self._text)
        self._text = ""

    def _print(self, text: str) -> None:
        self._live.update(Text(""))
        self._console.print(self._render(text.rstrip("\n")))
        if text.endswith("\n\n"):
            self._console.print()

    def _tail(self) -> Text:
        """The last lines of the open block, as many as certainly fit."""
        width, height = self._console.size
        most = max(1, height - 4)
        text = Text(self._text[-width * most :].rstrip("\n"))
        lines = text.wrap(self._console, width)
        return Text("\n").join(lines[-most:])


class Screen:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._stream: Stream | None = None
        self._thinking = False

    def thought(self, text: str) -> None:
        self._grow(text, True)

    def content(self, text: str) -> None:
        self._grow(text, False)

    def end(self) -> None:
        """The answer has ended, for any reason."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def note(self, text: str) -> None:
        self._console.print(Text(printable(text), "dim"))

    def error(self, text: str) -> None:
        self._console.print(Text(printable(text), "red"))

    def _grow(self, text: str, thinking: bool) -> None:
        if self._stream is not None and self._thinking != thinking:
            self.end()
            self._console.print()
        if self._stream is None:
            self._thinking = thinking
            self._stream = Stream(self._console, _thought if thinking else _content)
        self._stream.push(printable(text))


def _thought(text: str) -> RenderableType:
    return Text(text, "dim italic")


def _content(text: str) -> RenderableType:
    return Markdown(text, hyperlinks=False)  # a link's target stays visible
