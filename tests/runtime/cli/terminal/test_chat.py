"""A chat over a real engine: turns, Ctrl-C, what is taken back; and the whole on a terminal."""

import codecs
import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from PIL import Image
from rich.console import Console

from spark_engine.errors import OptionError, RequestError
from spark_engine.runtime.cli.terminal.chat import SecondInterrupt, TerminalChat
from spark_engine.runtime.cli.terminal.commands import run
from spark_engine.runtime.cli.terminal.conversation import ChatHistory, with_images
from spark_engine.runtime.cli.terminal.screen import Screen
from spark_engine.runtime.cli.terminal.session import Session
from spark_engine.runtime.engine.engine import EngineOptions
from spark_engine.runtime.engine.request import capacity
from spark_engine.runtime.server.engine_client import engine_folder
from spark_engine.runtime.server.prompts.chat_options import ChatOptions
from spark_engine.vision import VisionInfo
from tests.runtime import small_engine

SETTINGS = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_engine.build(tmp_path_factory.mktemp("engine"), tokenizer=True, context=512)


@pytest.fixture(scope="module")
def session(folder: Path) -> Iterator[Session]:
    made = Session(folder, EngineOptions())
    made.open()
    yield made
    made.close()


class Script:
    """What is typed, line after line; None is a line that Ctrl-C dropped."""

    def __init__(self, *lines: str | None) -> None:
        self._lines = list(lines)

    def read(self) -> str | None:
        if not self._lines:
            return None
        line = self._lines.pop(0)
        if line is None:
            raise KeyboardInterrupt
        return line


def _chat(session: Session) -> ChatHistory:
    return ChatHistory("small", capacity(session.info.limits), settings=dict(SETTINGS))


def _type(session: Session, chat: ChatHistory, *lines: str | None) -> str:
    out = io.StringIO()
    TerminalChat(session, chat, Script(*lines), Screen(Console(file=out, width=200))).run()
    return out.getvalue()


def test_a_sessions_options_are_those_of_its_chats(folder: Path) -> None:
    ask, open_thought = [{"role": "user", "content": "hi"}], "assistant\n<think>\n"
    plain = Session(folder, EngineOptions())
    assert plain.thinks and plain.render(ask).endswith(open_thought)
    kwargs = {"enable_thinking": False}
    for chat in (ChatOptions(template_kwargs=kwargs), ChatOptions(reasoning_effort="none")):
        session = Session(folder, EngineOptions(), chat)
        assert not session.thinks and session.render(ask).endswith("\n</think>\n\n")
        assert session.render(ask, True).endswith(open_thought)
        assert session.render(ask, False) == session.render(ask)


def test_turns_follow_each_other_and_the_beginning_is_cached(session: Session) -> None:
    chat = _chat(session)
    shown = _type(session, chat, "Once upon a time " * 12, "", None, "and then?", "/exit", "never")
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 2
    assert "never" not in str(chat.messages) and "up to 512 tokens" in shown
    figures = re.findall(r"\[6 tokens, cut at its limit, .*, (\d+) of (\d+) prompt", shown)
    assert len(figures) == 2 and int(figures[0][0]) == 0 and int(figures[1][0]) >= 64
    assert chat.totals.tokens == 12 and chat.totals.cached == int(figures[1][0])
    assert chat.used == int(figures[1][1]) + 6


def test_the_same_is_answered_again_and_by_settings(session: Session) -> None:
    chat = _chat(session)
    _type(session, chat, "/think off", "a bear")
    first = list(chat.messages)
    _type(session, chat, "/retry")
    assert chat.messages == first and "reasoning_content" not in first[1]
    _type(session, chat, "/set max-tokens 2", "/retry")
    assert len(chat.messages) == 2 and chat.totals.tokens == 6 + 6 + 2
    _type(session, chat, "/system You are a bear.", "//hi")
    assert chat.prompt()[0]["role"] == "system" and chat.messages[2]["content"] == "/hi"


def test_a_mistake_is_reported_and_the_chat_continues(session: Session) -> None:
    chat = _chat(session)
    shown = _type(session, chat, "/nope", "b " * 2000, "hi")
    assert "there is no /nope" in shown and "context length is 512 tokens" in shown
    assert [m["content"] for m in chat.messages if m["role"] == "user"] == ["hi"]
    before = chat.settings
    shown = _type(session, chat, "/set min-tokens 9999", "more")
    assert "min_tokens is 9999; at most" in shown
    assert len(chat.messages) == 2 and before is not chat.settings


def test_an_answer_that_a_stop_string_ended_leaves_nothing_to_the_next(session: Session) -> None:
    chat = _chat(session)
    _type(session, chat, "/think off", "a bear")
    text = chat.messages[1]["content"]
    _type(session, chat, f"/set stop {text.strip()[1]}", "/retry", "/set stop default", "/retry")
    assert chat.messages[1]["content"] == text
    assert chat.totals.answers == 3 and 12 < chat.totals.tokens < 18, "the second was cut"


def _interrupting(monkeypatch: pytest.MonkeyPatch, at: int, times: int) -> list[str]:
    """Ctrl-C after this many pieces of a thought; returns the pieces."""
    shown, seen = Screen.thought, []

    def thought(screen: Screen, text: str) -> None:
        shown(screen, text)
        seen.append(text)
        for _ in range(times if len(seen) == at else 0):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Screen, "thought", thought)
    return seen


def test_ctrl_c_stops_the_answer_alone(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    chat, before = _chat(session), signal.getsignal(signal.SIGINT)
    chat.settings["max_tokens"] = 200
    seen = _interrupting(monkeypatch, at=3, times=1)
    text = _type(session, chat, "a bear")
    tokens = int(re.findall(r"\[(\d+) tokens, stopped", text)[0])
    assert 3 <= tokens < 20 and chat.totals.tokens == tokens
    assert chat.messages[1]["reasoning_content"] == "".join(seen), "what came stays"
    _type(session, chat, "/set max-tokens 3", "and?")
    assert len(chat.messages) == 4 and chat.totals.tokens == tokens + 3, "and the chat continues"
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_ends_the_program(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    _interrupting(monkeypatch, at=1, times=2)
    chat, before = _chat(session), signal.getsignal(signal.SIGINT)
    with pytest.raises(SecondInterrupt):
        _type(session, chat, "a bear")
    assert signal.getsignal(signal.SIGINT) is before


# In the places of the sequences by which a prompt asks for pasted text, and ends that.
READY, SENT = "(ready)", "(sent)"


class Terminal:
    def __init__(self, words: list[str], home: Path) -> None:
        self.shown, self._at = "", 0
        self._half, self._decoder = "", codecs.getincrementaldecoder("utf-8")("replace")
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            os.chdir(home)
            os.environ.update(TERM="xterm", XDG_STATE_HOME=str(home))
            os.execv(
                sys.executable, [sys.executable, "-m", "spark_engine.runtime.cli.spark_run", *words]
            )
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))

    def until(self, words: str, seconds: float = 120.0) -> None:
        """Reads until the screen shows it, after the text of the last wait."""
        end = time.monotonic() + seconds
        while (found := self.shown.find(words, self._at)) < 0:
            assert time.monotonic() < end and self._read(0.2), (words, repr(self.shown[-900:]))
        self._at = found + len(words)

    def more(self, count: int, seconds: float = 120.0) -> None:
        """Reads until there are this many characters after the text of the last wait."""
        end = time.monotonic() + seconds
        while len(self.shown) < self._at + count:
            assert time.monotonic() < end and self._read(0.2), repr(self.shown[-900:])

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def end(self) -> int:
        """The exit code, once it has ended by itself."""
        end = time.monotonic() + 120.0
        while self._read(1.0):
            assert time.monotonic() < end, repr(self.shown[-900:])
        os.close(self._fd)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def _read(self, seconds: float) -> bool:
        """False at the end."""
        if not select.select([self._fd], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self._fd, 1 << 16)
        except OSError:  # Linux: the other side has closed
            return False
        text = self._half + self._decoder.decode(data)
        cut = re.search(r"\x1b(\[[0-9;?]*)?\Z", text)  # the rest comes with the next read
        text, self._half = (text[: cut.start()], cut[0]) if cut else (text, "")
        if "\x1b[6n" in text:  # where is the cursor?
            os.write(self._fd, b"\x1b[1;1R")
        text = text.replace("\x1b[?2004h", READY).replace("\x1b[?2004l", SENT)
        self.shown += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
        return bool(data)


def test_on_a_terminal(tmp_path: Path) -> None:
    """The answer would be of thousands of tokens: it is stopped long before it ends."""
    folder = small_engine.build(tmp_path / "long", tokenizer=True, context=4096)
    words = [str(folder), "--ignore-eos", "--no-thinking"]
    chat = Terminal(words, tmp_path)
    chat.until("Ctrl-D leaves.")
    chat.until(READY)
    chat.type("a bear\r")
    chat.until("a bear")
    chat.until(SENT)  # until then Ctrl-C is a key of the prompt, kept for the next one
    chat.more(20)  # of the answer
    chat.type("\x03")
    chat.until("tokens, stopped,")
    chat.until("cached]")
    chat.until(READY)
    chat.type("half a line\x03")
    chat.until(READY)
    chat.type("/save chat.json\r")
    chat.until("a body for /v1/chat/completions")
    chat.until(READY)
    chat.type("\x04")
    assert chat.end() == 0, chat.shown
    said = (tmp_path / "chat.json").read_text()
    assert '"content": "a bear"' in said and "half" not in said
    assert (tmp_path / "spark" / "history").is_file()


def test_images_go_with_the_next_message(
    folder: Path, session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = (0.5, 0.5, 0.5)
    vision = VisionInfo(16, 2, 1 << 10, 1 << 16, half, half, 10, 11, 12)
    info = msgspec.structs.replace(session.info, vision=vision)
    monkeypatch.setattr(engine_folder, "read_info", lambda _: info)
    seeing, chat, file = Session(folder, EngineOptions()), _chat(session), tmp_path / "a b.png"
    Image.new("RGB", (64, 32)).save(file)
    assert "a b.png" in run(f"/image {file}", chat).text
    chat.ask("what is it?")
    for ask in (True, False):
        ids, images = seeing.prompt(chat.messages, chat=ask)
        assert [(i.rows, i.columns) for i in images] == [(1, 2)] and ids.count(10) == 2
        assert ids[images[0].start - 1 : images[0].end + 1] == [11, 10, 10, 12]
    assert ids[4:] == seeing.encode("what is it?")
    chat.save(tmp_path / "chat.json")
    again = ChatHistory("small", 512)
    again.load(tmp_path / "chat.json", frozenset())
    assert again.messages == chat.messages and isinstance(again.messages[0]["content"], list)
    file.write_bytes(b"GIF89a")
    with pytest.raises(RequestError, match="damaged"):
        seeing.prompt([{"role": "user", "content": with_images([file], "x")}])
    with pytest.raises(RequestError, match="this engine reads no images"):
        session.prompt(chat.messages)
    with pytest.raises(OptionError, match="No such file"):
        run(f"/image {tmp_path}/none", chat)
    with pytest.raises(OptionError, match="/image needs the name"):
        run("/image", chat)
    run(f"/image {file}", chat)
    run("/new", chat)
    chat.ask("hi")
    assert chat.messages == [{"role": "user", "content": "hi"}]
