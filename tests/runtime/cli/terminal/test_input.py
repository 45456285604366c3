"""The keyboard of a chat: keys, several lines, history for its owner alone, completion."""

import stat
from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from spark_engine.runtime.cli.terminal.input import Commands, LineReader

TYPED = [
    ("hello\r", "hello"),
    ("one\x1b\rtwo\r", "one\ntwo"),
    ("\x1b[200~one\r\ntwo\x1b[201~\r", "one\ntwo"),
    ('"""\rone\r\rtwo\r"""\r', "one\n\ntwo"),
    ('"""one\rtwo"""\r', "one\ntwo"),
    ('"""one"""\r', "one"),
    ("\x04", None),
    ('"""one\r\x04', None),
    ("\r", ""),
]


def _read(keys: str, history: Path | None = None) -> str | None:
    with create_pipe_input() as pipe:
        lines = LineReader(history, input=pipe, output=DummyOutput())
        pipe.send_text(keys)
        return lines.read()


@pytest.mark.parametrize(("keys", "text"), TYPED)
def test_what_keys_make(keys: str, text: str | None) -> None:
    assert _read(keys) == text


def test_a_line_is_dropped_by_ctrl_c() -> None:
    for keys in ("half\x03", '"""one\rtwo\x03'):
        with pytest.raises(KeyboardInterrupt):
            _read(keys)


def test_history_is_kept_for_its_owner(tmp_path: Path) -> None:
    file = tmp_path / "state" / "spark" / "history"
    _read("a secret\r", file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert _read("\x1b[A\r", file) == "a secret", "the key up brings it back in another run"


def test_a_history_that_cannot_be_kept_is_no_reason_to_stop() -> None:
    assert _read("hello\r", Path("/proc/none/history")) == "hello"


def test_completion(tmp_path: Path) -> None:
    def found(text: str) -> set[str]:
        rows = Commands().get_completions(Document(text), CompleteEvent())
        return {row.text for row in rows}

    assert found("/se") == {"/set"} and found("/think ") == {"on", "off"}
    assert "temperature" in found("/set te") and found("Hello wor") == set()
    (tmp_path / "chat.json").touch()
    assert found(f"/load {tmp_path}/ch") == {"at.json"}
