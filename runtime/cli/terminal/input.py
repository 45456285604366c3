"""Reads the lines typed in a chat: editing, history, completion of /commands, several lines.

Knows prompt_toolkit. Does not know the meaning of a line.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from spark_engine.runtime.cli.terminal.commands import COMMANDS, MARK

PROMPT, MORE = "> ", "… "
BLOCK = '"""'  # on separate lines, around a message of several lines


class LineReader:
    """The keyboard. `history`: the file of typed lines, readable only by its owner; None, or a file
    that cannot be written, keeps them for this run."""

    def __init__(self, history: Path | None, **terminal: Any) -> None:
        """`terminal` is passed to prompt_toolkit: another input and output than the process's."""
        self._session: PromptSession[str] = PromptSession(
            history=_history(history),
            completer=Commands(),
            complete_while_typing=False,
            multiline=True,
            key_bindings=_keys(),
            prompt_continuation=MORE,
            **terminal,
        )

    def read(self) -> str | None:
        """The next message or command; None at the end.

        Raises KeyboardInterrupt when a line was dropped by Ctrl-C.
        """
        try:
            text = self._session.prompt(PROMPT)
            if not text.lstrip().startswith(BLOCK):
                return text
            text = text.lstrip().removeprefix(BLOCK)
            while not text.rstrip().endswith(BLOCK):
                text += "\n" + self._session.prompt(MORE)
        except EOFError:
            return None
        return text.rstrip().removesuffix(BLOCK).strip("\n")


def _keys() -> KeyBindings:
    """Enter sends, Alt-Enter starts a new line."""
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


class Commands(Completer):
    """Completes the names of commands, and the words or files that follow one."""

    def __init__(self) -> None:
        self._files = PathCompleter(expanduser=True)

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        text = document.text_before_cursor
        name, gap, rest = text.partition(" ")
        if not text.startswith(MARK):
            return
        known = {MARK + row.name: row for row in COMMANDS}
        row = known.get(name)
        if not gap:
            yield from (Completion(k, -len(name)) for k in known if k.startswith(name))
        elif row is not None and row.files:
            yield from self._files.get_completions(Document(rest), complete_event)
        elif row is not None:
            yield from (Completion(w, -len(rest)) for w in row.choices if w.startswith(rest))


def _history(path: Path | None) -> History:
    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)
