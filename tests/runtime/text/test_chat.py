"""Chat templates, and answers taken apart at every split point."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_engine.errors import EngineError, RequestError
from spark_engine.runtime.text.chat import ChatTemplate
from spark_engine.runtime.text.reply_parser import Delta, Kind, ReplyParser
from tests.runtime import small_tokenizer

USER = {"role": "user", "content": " hello <b>&</b> "}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "hours": {"anyOf": [{"type": "array"}, {"type": "null"}]},
                },
            },
        },
    }
]


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


def test_tool_call_arguments_become_mappings(template: ChatTemplate) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": '{"city": "Paris"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert "city=Paris" in template.render([USER, message])
    for bad in ("{", "[1]", 7):
        call["function"] = {"name": "f", "arguments": bad}
        with pytest.raises(RequestError, match="JSON object"):
            template.render([USER, message])


@pytest.mark.parametrize(
    ("message", "options", "words"),
    [
        ({"role": "developer", "content": "x"}, {}, "Unexpected message role developer"),
        ({"role": "user", "content": 3}, {}, "refused the messages"),
        ({"role": "user", "content": "x"}, {"messages": []}, "'messages'"),
        ({"role": "assistant", "tool_calls": [{"x": 1}]}, {}, "no function"),
    ],
)
def test_what_the_template_refuses_is_the_requests_fault(
    template: ChatTemplate, message: dict[str, object], options: dict[str, object], words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        template.render([message], options=options)


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


def _render(folder: Path) -> str:
    template = ChatTemplate.load(folder)
    assert template is not None
    return template.render([USER])


CALL_TEXT = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nPa\nris\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n<parameter=hours>\n[1, 2]\n</parameter>\n"
    "</function>\n</tool_call>"
)
CALL = ("weather", {"city": "Pa\nris", "days": 3, "hours": [1, 2]})
BAD_CALL = "<tool_call>\n<function=weather>city: Paris</function>\n</tool_call>"
R, C = Kind.REASONING, Kind.CONTENT

# thinking, tools, the answer, what must come out of it: reasoning, content, calls
ANSWERS = [
    (True, False, "\nI think.\n\nYes.\n</think>\n\nFour.\n", "I think.\n\nYes.", "Four.\n", []),
    (True, False, "still <thinking", "still <thinking", "", []),
    (True, False, "</think>a</think>b", "", "a</think>b", []),
    (True, False, "<think>\na < b\n</think>c", "a < b", "c", []),
    (True, False, "hm" + CALL_TEXT, "hm" + CALL_TEXT, "", []),
    (False, False, "\n <think>why</think>so", "why", "so", []),
    (False, False, "  plain <think>x</think>\n", "", "  plain <think>x</think>\n", []),
    (False, False, " ", "", " ", []),
    (False, False, "<thin", "", "<thin", []),
    (False, False, CALL_TEXT, "", CALL_TEXT, []),
    (False, True, CALL_TEXT, "", "", [CALL]),
    (False, True, "Let me see.\n\n" + CALL_TEXT + "\n", "", "Let me see.", [CALL]),
    (True, True, "why\n</think>\n\n" + CALL_TEXT + "\n" + CALL_TEXT, "why", "", [CALL, CALL]),
    (True, True, "why\n" + CALL_TEXT, "why", "", [CALL]),
    (False, True, "a" + BAD_CALL + "b", "", "a" + BAD_CALL + "b", []),
    (False, True, "a" + CALL_TEXT[:40], "", "a" + CALL_TEXT[:40], []),
    (False, True, "a <tool_cal", "", "a <tool_cal", []),
    (False, True, "1 < 2\n\n", "", "1 < 2\n\n", []),
]
Parts = tuple[str, str, list[tuple[str, object]]]


def _parts(pieces: list[str], thinking: bool, tools: bool) -> Parts:
    parser = ReplyParser(thinking, TOOLS if tools else ())
    deltas: list[Delta] = []
    for piece in pieces:
        deltas += parser.push(piece)
    deltas += parser.flush()
    assert all(d.text for d in deltas)
    texts = {k: "".join(d.text for d in deltas if d.kind is k) for k in (R, C)}
    calls = [(d.name, json.loads(d.text)) for d in deltas if d.kind is Kind.CALL]
    assert parser.calls == len(calls)
    return texts[R], texts[C], calls


@pytest.mark.parametrize(("thinking", "tools", "text", "reasoning", "content", "calls"), ANSWERS)
def test_an_answer_is_taken_apart_at_every_split_point(
    thinking: bool, tools: bool, text: str, reasoning: str, content: str, calls: list[object]
) -> None:
    want = (reasoning, content, calls)
    assert _parts([text], thinking, tools) == want
    assert _parts(list(text), thinking, tools) == want
    for i in range(len(text) + 1):
        assert _parts([text[:i], text[i:]], thinking, tools) == want, (text[:i], text[i:])


ALPHABET = ["<think>", "</think>", "<tool_call>", "</tool_call>", "\n", "a", "<", CALL_TEXT]


@given(
    words=st.lists(st.sampled_from(ALPHABET), max_size=8),
    flags=st.tuples(st.booleans(), st.booleans()),
    data=st.data(),
)
@settings(max_examples=400, deadline=None)
def test_an_answer_does_not_depend_on_the_cut(
    words: list[str], flags: tuple[bool, bool], data: st.DataObject
) -> None:
    text = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    edges = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    assert _parts(pieces, *flags) == _parts([text], *flags)


def test_deltas_flow_before_the_end() -> None:
    parser = ReplyParser(thinking=True)
    assert parser.push("hello ") == [Delta(R, "hello ")]
    assert parser.push("world</thi") == [Delta(R, "world")]
    assert parser.push("nk>\n\nfour") == [Delta(C, "four")]


def test_values_that_are_not_json_stay_strings() -> None:
    text = CALL_TEXT.replace("\n3\n", "\nthree\n").replace("[1, 2]", "None")
    _, _, calls = _parts([text], False, True)
    assert calls == [("weather", {"city": "Pa\nris", "days": "three", "hours": None})]


@pytest.mark.parametrize("text", ["42", "true", "[1]", "null"])
def test_a_parameter_without_a_schema_stays_text(text: str) -> None:
    call = (
        f"<tool_call>\n<function=weather>\n<parameter=city>\n{text}\n</parameter>\n"
        f"<parameter=other>\n{text}\n</parameter>\n<parameter=days>\n42\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    (delta,) = ReplyParser(False, TOOLS).push(call)
    assert json.loads(delta.text) == {"city": text, "other": text, "days": 42}
