"""Chat templates: their inputs, refusals and locations."""

import json
from pathlib import Path

import pytest

from spark_engine.errors import EngineError, RequestError
from spark_engine.runtime.text.chat import ChatTemplate, Ending
from spark_engine.runtime.text.reply_formats import Formats
from tests.repository import ROOT
from tests.runtime import small_tokenizer

USER = {"role": "user", "content": " hello <b>&</b> "}
CALL = {"function": {"name": "f"}}


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(small_tokenizer.TEMPLATE)


def test_thinking_is_on_unless_switched_off(template: ChatTemplate) -> None:
    start = "<|im_start|>user\nhello <b>&</b><|im_end|>\n<|im_start|>assistant\n"
    assert template.render([USER]) == start + "<think>\n"
    off = template.render([USER], options={"enable_thinking": False})
    assert off == start + "<think>\n\n</think>\n\n"


def test_tools_reach_the_template_unescaped(template: ChatTemplate) -> None:
    tools = [{"type": "function", "function": {"name": "a<b>&é"}}]
    assert json.dumps(tools[0], ensure_ascii=False) in template.render([USER], tools)


def test_half_a_surrogate_pair_in_a_calls_arguments_ends_no_chat(template: ChatTemplate) -> None:
    arguments = r'{"city": "\ud83d, \ud83d\ude42"}'
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    text = template.render([USER, {"role": "assistant", "content": None, "tool_calls": [call]}])
    assert "city=\ufffd, 🙂" in text


def test_an_option_of_a_template_may_have_any_name(template: ChatTemplate) -> None:
    assert template.render([USER], options={"self": 1, "loop": 2}) == template.render([USER])


def test_the_sandbox_holds() -> None:
    for source in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
    ):
        with pytest.raises(RequestError):
            ChatTemplate(source).render([USER])


def test_blocks_are_trimmed_and_loops_have_break() -> None:
    source = "  {% for m in messages %}\n    {% break %}\n  {% endfor %}\nx"
    assert ChatTemplate(source).render([USER]) == "x"
    assert ChatTemplate("{{ strftime_now('%Y') }}").render([USER]).startswith("2")


def test_where_templates_are_found(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "A{{ eos_token }}", "eos_token": "<E>"}))
    assert _render(tmp_path) == "A<E>"
    named = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert _render(tmp_path) == "D"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert _render(tmp_path) == "J"
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(EngineError, match="does not compile"):
        ChatTemplate.load(tmp_path)


def test_a_prompt_says_whether_a_thought_is_open(template: ChatTemplate) -> None:
    thoughts = Formats().thoughts
    assert template.prompt([USER], thoughts=thoughts).thinking
    off = template.prompt([USER], options={"enable_thinking": False}, thoughts=thoughts)
    assert not off.thinking and off.fresh
    assert not template.prompt([USER], thoughts=None).thinking
    said = {"role": "user", "content": "what does <think> mean: <think>"}
    nothing = template.prompt([said], ending=Ending.NOTHING, thoughts=thoughts)
    assert not nothing.thinking and nothing.text.endswith("<think><|im_end|>\n")


def test_a_message_continues_at_its_end(template: ChatTemplate) -> None:
    message = {"role": "assistant", "content": "The answer is "}
    found = template.prompt([USER, message], ending=Ending.CONTINUE)
    assert found.text.endswith("<|im_start|>assistant\nThe answer is ")
    assert not found.thinking and not found.fresh
    empty = template.prompt([USER, {**message, "content": ""}], ending=Ending.CONTINUE)
    assert empty.text.endswith("<|im_start|>assistant\n")


def test_a_thought_continues_too() -> None:
    template = ChatTemplate((ROOT / "models/tiny/checkpoint/chat_template.jinja").read_text())
    message = {"role": "assistant", "content": None, "reasoning_content": "Let me see"}
    found = template.prompt([USER, message], ending=Ending.CONTINUE)
    assert found.text.endswith("<|im_start|>assistant\n<think>\nLet me see") and found.thinking
    whole = {**message, "content": "It is"}
    found = template.prompt([USER, whole], ending=Ending.CONTINUE)
    assert found.text.endswith("\nLet me see\n</think>\n\nIt is") and not found.thinking


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([USER], "needs an assistant's message"),
        ([], "needs an assistant's message"),
        ([USER, {"role": "assistant", "tool_calls": [CALL]}], "without tool calls"),
        (
            [USER, {"role": "assistant", "reasoning_content": "why"}],
            "leaves out the last message's",
        ),
    ],
)
def test_messages_that_cannot_be_continued(
    template: ChatTemplate, messages: list[dict[str, object]], words: str
) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        template.prompt(messages, ending=Ending.CONTINUE)
    assert caught.value.param == "continue_final_message"


def test_how_a_prompt_ends_is_said_by_two_fields() -> None:
    assert Ending.of(None, None) is Ending.of(True, None) is Ending.of(True, False) is Ending.ANSWER
    assert Ending.of(False, None) is Ending.of(False, False) is Ending.NOTHING
    assert Ending.of(None, True) is Ending.of(False, True) is Ending.CONTINUE
    with pytest.raises(RequestError, match="both true"):
        Ending.of(True, True)


def _render(folder: Path) -> str:
    template = ChatTemplate.load(folder)
    assert template is not None
    return template.render([USER])
