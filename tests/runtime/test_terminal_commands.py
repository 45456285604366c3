"""The /commands of a chat: each does what its line of /help says, and a mistake is a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_engine.errors import OptionError, RequestError, UserError
from spark_engine.runtime.terminal_commands import COMMANDS, SETTINGS, Next, run
from spark_engine.runtime.terminal_conversation import Conversation


@pytest.fixture
def chat() -> Conversation:
    return Conversation("small", 256)


def test_help_has_a_line_of_a_terminal_for_every_command(chat: Conversation) -> None:
    lines = run("/help", chat).text.splitlines()
    assert [line.split()[0] for line in lines[: len(COMMANDS)]] == [f"/{c.name}" for c in COMMANDS]
    assert max(map(len, lines)) <= 80


def test_system_and_think(chat: Conversation) -> None:
    assert "no system message" in run("/system", chat).text
    run("/system  You are a bear.", chat)
    assert chat.system == "You are a bear." and "bear" in run("/system", chat).text
    run("/system off", chat)
    assert chat.system is None
    assert run("/think", chat).text == "thinking is on" and run("/THINK off", chat).text
    assert chat.thinking is False and run("/think on", chat).text == "thinking is on"
    assert chat.thinking is True


def test_settings_are_set_shown_and_reset(chat: Conversation) -> None:
    assert "nothing is set" in run("/set", chat).text
    assert run("/set temperature 0.7", chat).text == "temperature is 0.7"
    run("/set max_tokens 12", chat)
    run("/set stop END OF IT", chat)
    assert chat.settings == {"temperature": 0.7, "max_tokens": 12, "stop": ["END OF IT"]}
    assert run("/set", chat).text == "max-tokens 12, temperature 0.7, stop ['END OF IT']"
    assert run("/set temperature default", chat).text == "temperature is as by default"
    run("/set ignore-eos true", chat)
    assert chat.settings == {"max_tokens": 12, "stop": ["END OF IT"], "ignore_eos": True}
    assert {"temperature", "top-p", "top-k", "min-p", "seed"} <= set(SETTINGS)


WRONG = [
    ("/hepl", "did you mean help?"),
    ("/etc/passwd", "typed with two"),
    ("/new chat", "/new takes nothing, not 'chat'"),
    ("/think maybe", "give on or off"),
    ("/set heat 1", "no setting 'heat'"),
    ("/set temprature 1", "did you mean temperature?"),
    ("/set temperature", "needs a value"),
    ("/set temperature hot", "'hot' is not a valid float"),
    ("/set temperature 9", "temperature is 9.0; it must be from 0 to 2"),
    ("/set top-k 1.5", "'1.5' is not a valid integer"),
    ("/save", "needs the name of a file"),
    ("/load", "needs the name of a file"),
    ("/save /proc/none/x", "No such file"),
]


@pytest.mark.parametrize(("line", "words"), WRONG)
def test_a_mistake_is_a_sentence_and_changes_nothing(
    chat: Conversation, line: str, words: str
) -> None:
    with pytest.raises(UserError) as error:
        run(line, chat)
    assert isinstance(error.value, OptionError | RequestError) and words in str(error.value)
    assert chat == Conversation("small", 256)


def test_save_and_load_remember_the_file(
    chat: Conversation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    chat.ask("hi")
    assert "/v1/chat/completions" in run("/save ~/chat.json", chat).text
    chat.clear()
    assert run("/load", chat).text.endswith("1 messages") and chat.messages[0]["content"] == "hi"
    run("/save", chat)
    assert (tmp_path / "chat.json").is_file()


def test_what_follows_a_command(chat: Conversation) -> None:
    with pytest.raises(RequestError, match="nothing was asked"):
        run("/retry", chat)
    chat.ask("hi")
    chat.reply({})
    assert run("/retry", chat).next is Next.ANSWER and chat.messages[-1]["role"] == "user"
    assert run("/exit", chat).next is Next.LEAVE and run("/stats", chat).next is Next.ASK
    assert run("/new", chat).next is Next.ASK and chat.messages == []


def test_stats(chat: Conversation) -> None:
    assert "answers   0, 0 tokens\n" in run("/stats", chat).text
    total = chat.totals
    total.answers, total.tokens, total.decoded, total.seconds = 2, 1234, 1000, 8.0
    total.prompt_tokens, total.cached, total.drafted, total.accepted = 2000, 1900, 10, 7
    chat.used = 99
    text = run("/stats", chat).text
    for words in ("99 of 256 tokens", "1,234 tokens, 125.0 tokens/s", "1,900 of them cached"):
        assert words in text
    assert "drafts    7 of 10 kept" in text
