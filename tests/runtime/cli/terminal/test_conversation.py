"""A chat: its messages, removing the last ones, and loading a saved chat."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from spark_engine.errors import OptionError, RequestError
from spark_engine.runtime.cli.terminal.commands import FIELDS
from spark_engine.runtime.cli.terminal.conversation import ChatHistory, Totals
from spark_engine.runtime.cli.terminal.session import Answer
from spark_engine.runtime.engine.request import Event, FinishReason
from spark_engine.runtime.server.api.chat_request import ChatRequest
from spark_engine.runtime.text.reply_parts import Kind


def _chat() -> ChatHistory:
    chat = ChatHistory("small", 256, "Be brief.", False, {"temperature": 0.5, "stop": ["x"]})
    chat.ask("hé")
    chat.reply({Kind.REASONING: "Well.", Kind.CONTENT: "Yes."})
    chat.ask("and?")
    chat.reply({Kind.REASONING: "", Kind.CONTENT: "No."})
    return chat


def test_what_a_template_gets() -> None:
    assert _chat().prompt() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hé"},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "Well."},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "No."},
    ]


def test_a_saved_chat_is_a_request_and_is_loaded_again(tmp_path: Path) -> None:
    chat, file = _chat(), tmp_path / "chat.json"
    chat.save(file)
    body = msgspec.json.decode(file.read_bytes(), type=ChatRequest)
    assert body.model == "small" and body.temperature == 0.5 and len(body.messages) == 5
    assert body.chat_template_kwargs == {"enable_thinking": False}
    other = ChatHistory("small", 256, thinking=True, settings={"seed": 3})
    other.load(file, FIELDS)
    assert other.prompt() == chat.prompt() and other.thinking is False and other.file == file
    assert other.settings == chat.settings
    other.save(file)  # its own file
    with pytest.raises(OptionError, match="exists already"):
        ChatHistory("small", 256).save(file)


WRONG: list[tuple[Any, str]] = [
    ("{", "not JSON"),
    (b"\xff", "not JSON"),
    ("[]", "must hold an object"),
    ("{}", "messages must be a list"),
    ('{"messages": [{"role": "tool", "content": "x"}]}', "messages must be a list"),
    ('{"messages": [{"role": "user", "content": ["x"]}]}', "messages must be a list"),
    ('{"messages": [{"role": "user", "content": "", "reasoning_content": 1}]}', "must be a list"),
    (
        '{"messages": [{"role": "user", "content": ""}, {"role": "system", "content": ""}]}',
        "only be the first",
    ),
]


@pytest.mark.parametrize(("text", "words"), WRONG)
def test_what_is_no_chat_is_refused_and_changes_nothing(
    tmp_path: Path, text: Any, words: str
) -> None:
    file, chat = tmp_path / "chat.json", _chat()
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(OptionError, match=words):
        chat.load(file, FIELDS)
    assert chat == _chat()
    with pytest.raises(OptionError, match="No such file"):
        chat.load(tmp_path / "none", FIELDS)


def test_fields_of_a_request_that_are_no_settings_are_left(tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    file.write_text(json.dumps({"messages": [], "n": 4, "top_k": 3, "seed": None, "tools": []}))
    chat = _chat()
    chat.load(file, FIELDS)
    assert chat.settings == {"top_k": 3} and chat.system is None and chat.thinking


def test_an_answer_is_taken_back_and_asked_again() -> None:
    chat = _chat()
    chat.take_back_answer()
    chat.take_back_answer()  # it was not answered since
    assert chat.messages[-1] == {"role": "user", "content": "and?"}
    chat.clear()
    assert chat.prompt() == [{"role": "system", "content": "Be brief."}]
    with pytest.raises(RequestError, match="no message was sent yet"):
        chat.take_back_answer()


def test_sums_count_what_is_decoded_behind_the_first_token() -> None:
    totals = Totals()
    events = [Event(0, token) for token in (5, 6, 7)]
    for more in ({"events": events, "drafts": (4, 3)}, {"events": events[:1]}):
        answer = Answer(0, (1, 2), 0, True, False, 0.0, finish=FinishReason.STOP, cached=1, **more)
        answer.first_s, answer.total_s = 1.0, 2.0
        totals.add(answer)
    assert totals == Totals(2, 4, 4, 2, decoded=2, seconds=1.0, drafted=4, accepted=3)
