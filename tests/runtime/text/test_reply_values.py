"""The end of a parameter's value: each rule of `reply_values`, token by token and at once."""

import json
from typing import Any

import pytest

from spark_engine.runtime.text.reply_formats import marks
from spark_engine.runtime.text.reply_parser import ReplyParser
from spark_engine.runtime.text.reply_parts import Kind
from tests.runtime.text.reply_cuts import tool
from tests.runtime.text.test_reply_parser import collect

HEAD = "<tool_call>\n<function=write>\n<parameter=path>\n"
TAIL = "\n</parameter>\n</function>\n</tool_call>"
CALL = "<tool_call>\n<function=free>\n<parameter=any>\n1" + TAIL


TOOLS = [tool("write", path={"type": "string"}, n={"type": "integer"}), tool("free")]
TOOLS[0]["function"]["parameters"]["additionalProperties"] = True


def _read(text: str, size: int, cut: bool = False) -> tuple[str, list[tuple[str, str]], bool]:
    """(content, calls, whether the last is cut), for this many characters a round; all marks are
    tokens."""
    parser, deltas = ReplyParser(False, TOOLS, tokens=marks()), []
    for at in range(0, len(text), size):
        places = [i for i in range(at, at + size) if text[i : i + 12].startswith(tuple(marks()))]
        deltas += parser.push(text[at : at + size], places)
    _, content, calls = collect(deltas + parser.flush(cut))
    return content, calls, parser.is_cut


def _whole(text: str) -> tuple[str, list[tuple[str, Any]], bool]:
    found = {str(_read(HEAD + text, size)): _read(HEAD + text, size) for size in (1, 7, 999)}
    assert len(found) == 1, found
    ((content, calls, cut),) = found.values()
    return content, [(name, json.loads(given)) for name, given in calls], cut


def _path(value: str) -> tuple[str, list[tuple[str, Any]], bool]:
    return "", [("write", {"path": value})], False


@pytest.mark.parametrize(
    "value",
    [
        "A block ends with </tool_call> on its own.",
        "</tool_call>",
        "a\n</function>\n</tool_call>\n\nand more",
        "</tool_call> <tool_call> </tool_call>",
        "<think>\na\n</think>\n",
        "a</parameter> b",
        "a\n</parameter/>\nb",
        "see <tool_call>\n<function=other>",
        f"one\n{CALL}\ntwo\n{CALL}\n{CALL}",
        "a\n<parameter=foo>\nb",
        "a\n<parameter=path>\nb",
        "a <parameter=n> b",
    ],
)
def test_a_value_may_hold_the_forms_own_words(value: str) -> None:
    assert _whole(value + TAIL) == _path(value)
    content, calls, cut = _whole(f"{value}{TAIL}\n{CALL}\n\nDone.")
    assert (content, calls[0], len(calls), cut) == ("Done.", ("write", {"path": value}), 2, False)


@pytest.mark.parametrize("gap", ["", "\n"])
def test_the_calls_end_ends_an_open_value_when_nothing_of_it_follows(gap: str) -> None:
    end = f"a{gap}</tool_call>"
    assert _whole(end) == _whole(f"{end}\n</tool_call>\n") == _path("a")
    assert _whole(f"{end}\n\nDone.") == ("Done.", [("write", {"path": "a"})], False)
    assert _whole(f"a\n</function>{gap}</tool_call>") == _whole("a\n</function>") == _path("a")
    later = _whole(f"{end}\nNow\n{CALL}")
    assert later == ("Now", [("write", {"path": "a"}), ("free", {"any": "1"})], False)


@pytest.mark.parametrize(
    "mark",
    [
        *("</parameter/>", "</parameter1>", "</parameter >", "</Parameter>", "</parameters>"),
        *("</ parameter>", "</PARAMETER>", "</parameter=path>", "</parameter", "<parameter>"),
    ],
)
def test_near_misses_end_a_value_where_an_end_follows(mark: str) -> None:
    for end in ("\n</function>\n</tool_call>", "\n</tool_call>", "\n</function>"):
        assert _whole(f"Oslo\n{mark}{end}") == _path("Oslo")
        assert _whole(f"a\nOslo\n{mark}{end}") == _path("a\nOslo")
    both = [("write", {"path": "Oslo", "n": 3})]
    assert _whole(f"Oslo\n{mark}\n<parameter=n>\n3{TAIL}") == ("", both, False)
    for text in (f"Oslo\n{mark}\nmore", f"{mark}\n<parameter=foo>\nmore"):
        assert _whole(text + TAIL) == _path(text)


def test_a_parameter_that_may_follow_ends_an_open_value() -> None:
    assert _whole("a\n<parameter=n>\n3" + TAIL)[1] == [("write", {"path": "a", "n": 3})]
    assert _whole("<parameter=n>\n3" + TAIL)[1] == [("write", {"path": "", "n": 3})]
    head = "a" + TAIL + "\n<tool_call>\n<function=free>\n<parameter=any>\n"
    free = _whole(head + "b\n<parameter=more>\nc\n<parameter=any>\nd" + TAIL)[1][1]
    assert free == ("free", {"any": "b", "more": "c\n<parameter=any>\nd"})


@pytest.mark.parametrize("second", ["b", "</tool_call> b", "b</tool_call> c"])
def test_of_a_parameter_that_comes_twice_the_first_counts(second: str) -> None:
    text = f"a\n</parameter>\n<parameter=path>\n{second}\n</parameter>\n<parameter=n>\n3{TAIL}"
    content, calls, cut = _read(HEAD + text, 1)
    assert (content, calls, cut) == ("", [("write", '{"path": "a", "n": 3}')], False)


def test_an_answer_that_was_cut_off_is_inside_its_value() -> None:
    text = HEAD + "ends with </tool_call> here"
    assert _read(text, 1, cut=True) == _read(text, 99, cut=True)
    assert _read(text, 1, cut=True)[2] and not _read(text, 1)[2]
    assert _read(HEAD + "a\n</function>", 1, cut=True)[2]
    assert not _read(HEAD + "a\n</tool_call>\n", 1, cut=True)[2]


def test_a_string_streams_unless_it_may_have_ended() -> None:
    parser = ReplyParser(False, TOOLS, tokens=marks())
    parser.push(HEAD, (0,))

    def said(text: str, *places: int) -> str:
        return "".join(delta.text for delta in parser.push(text, places))

    pieces = {"a": "a", " <b>": " <b>", "\n": "", "c": "\\nc", "</par": ""}
    assert {text: said(text) for text in pieces} == pieces
    assert said("ent>") == "</parent>"
    at = len(HEAD) + len("a <b>\nc</parent>")
    assert said("</tool_call>", at) + said(" and") == ""
    assert said(" more\n</parameter>\n</function>") == '</tool_call> and more"}'


@pytest.mark.parametrize(
    "text",
    [
        '{"path": "a </tool_call> b"}\n</function>\n</tool_call>',
        '{"path": "a </function> </tool_call> b",}\n</function>',
        '{"path": "a </tool_call> b"}\n</tool_call>',
    ],
)
def test_a_string_in_an_object_may_hold_ends(text: str) -> None:
    for size in (1, 5, 999):
        _, calls, cut = _read("<tool_call>\n<function=write>\n" + text, size)
        assert json.loads(calls[0][1])["path"].startswith("a </") and not cut


def test_a_thought_may_speak_of_a_call() -> None:
    thought = "I write <tool_call>\nand then </tool_call>"
    text = f"{thought}\n</think>\n\n{CALL}"
    for size in (1, 9, 999):
        parser, deltas = ReplyParser(True, TOOLS, tokens=marks()), []
        places = [i for i in range(len(text)) if text[i:].startswith(tuple(marks()))]
        for at in range(0, len(text), size):
            deltas += parser.push(text[at : at + size], places)
        reasoning, content, calls = collect(deltas + parser.flush())
        assert (reasoning, content, calls) == (thought, "", [("free", '{"any": "1"}')])
        assert {delta.kind for delta in deltas} == {Kind.REASONING, Kind.CALL}
