"""The /commands of a chat: each does what its line in /help says, and a mistake gives a message."""

from pathlib import Path

import pytest

from spark_engine.errors import OptionError, RequestError, UserError
from spark_engine.runtime.cli.terminal.commands import COMMANDS, SETTINGS, Next, run
from spark_engine.runtime.cli.terminal.conversation import ChatHistory


@pytest.fixture
def chat() -> ChatHistory:
    return ChatHistory("small", 256)


def test_help_has_a_line_of_a_terminal_for_every_command(chat: ChatHistory) -> None:
    lines = run("/help", chat).text.splitlines()
    assert [line.split()[0] for line in lines[: len(COMMANDS)]] == [f"/{c.name}" for c in COMMANDS]
    assert max(map(len, lines)) <= 80


def test_system_and_think(chat: ChatHistory) -> None:
    assert "no system message" in run("/system", chat).text
    run("/system  You are a bear.", chat)
    assert chat.system == "You are a bear." and "bear" in run("/system", chat).text
    run("/system off", chat)
    assert chat.system is None
    assert run("/think", chat).text == "thinking is on" and run("/THINK off", chat).text
    assert chat.thinking is False and run("/think on", chat).text == "thinking is on"
    assert chat.thinking is True


def test_settings_are_set_shown_and_reset(chat: ChatHistory) -> None:
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
    chat: ChatHistory, line: str, words: str
) -> None:
    with pytest.raises(UserError) as error:
        run(line, chat)
    assert isinstance(error.value, OptionError | RequestError) and words in str(error.value)
    assert chat == ChatHistory("small", 256)


def test_save_and_load_remember_the_file(
    chat: ChatHistory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    chat.ask("hi")
    assert "/v1/chat/completions" in run("/save ~/chat.json", chat).text
    chat.clear()
    assert run("/load", chat).text.endswith("1 messages") and chat.messages[0]["content"] == "hi"
    run("/save", chat)
    assert (tmp_path / "chat.json").is_file()


def test_what_follows_a_command(chat: ChatHistory) -> None:
    with pytest.raises(RequestError, match="no message was sent yet"):
        run("/retry", chat)
    chat.ask("hi")
    chat.reply({})
    assert run("/retry", chat).next is Next.ANSWER and chat.messages[-1]["role"] == "user"
    assert run("/exit", chat).next is Next.LEAVE and run("/stats", chat).next is Next.ASK
    assert run("/new", chat).next is Next.ASK and chat.messages == []


def test_names_of_other_programs_work(chat: ChatHistory) -> None:
    assert run("/?", chat).text == run("/help", chat).text
    chat.ask("hi")
    run("/clear", chat)
    assert chat.messages == [] and "model     small" in run("/model", chat).text
    assert run("/quit", chat).next is Next.LEAVE and run("/bye", chat).next is Next.LEAVE


def test_undo_removes_a_question_with_its_answer(chat: ChatHistory) -> None:
    with pytest.raises(RequestError, match="no message was sent yet"):
        run("/undo", chat)
    for text in ("one", "two"):
        chat.ask(text)
        chat.reply({})
    assert "2 messages are left" in run("/undo", chat).text
    assert [m["content"] for m in chat.messages] == ["one", ""]


def test_a_file_goes_with_the_next_message(chat: ChatHistory, tmp_path: Path) -> None:
    path = tmp_path / "notes.md"
    path.write_text("```\ncode\n```\n")
    assert "notes.md, 13 characters" in run(f"/file {path}", chat).text
    chat.ask("Explain.")
    assert chat.messages[-1]["content"] == "notes.md:\n````\n```\ncode\n```\n````\n\nExplain."
    chat.ask("More.")
    assert chat.messages[-1]["content"] == "More."
    path.write_bytes(b"\xff\xfe")
    for line, words in (
        (f"/file {path}", "is not a text file"),
        ("/file", "needs the name"),
        (f"/file {tmp_path / 'none'}", "No such file"),
    ):
        with pytest.raises(OptionError, match=words):
            run(line, chat)


def test_penalties_are_settings(chat: ChatHistory) -> None:
    run("/set presence-penalty 1.5", chat)
    run("/set frequency_penalty 0.5", chat)
    run("/set repetition-penalty 1.05", chat)
    wanted = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.05}
    assert chat.settings == wanted
    with pytest.raises(RequestError, match="must be from -2 to 2"):
        run("/set presence-penalty 3", chat)


def test_stats(chat: ChatHistory) -> None:
    assert "answers   0, 0 tokens\n" in run("/stats", chat).text
    total = chat.totals
    total.answers, total.tokens, total.decoded, total.seconds = 2, 1234, 1000, 8.0
    total.prompt_tokens, total.cached, total.drafted, total.accepted = 2000, 1900, 10, 7
    chat.used = 99
    text = run("/stats", chat).text
    for words in ("99 of 256 tokens", "1,234 tokens, 125.0 tokens/s", "1,900 of them cached"):
        assert words in text
    assert "drafts    7 of 10 kept" in text
