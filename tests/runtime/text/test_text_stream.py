"""The text of one choice: end ids, stop strings across token borders, delayed text."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_engine.runtime.engine.request import Event, FinishReason, SamplingParams
from spark_engine.runtime.text.reply_formats import Formats
from spark_engine.runtime.text.reply_parser import ReplyParser
from spark_engine.runtime.text.text_stream import Piece, TextStream
from spark_engine.runtime.text.tokenizer import Tokenizer

END = 3
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


def _feed(stream: TextStream, ids: list[int], last: FinishReason, size: int = 1) -> list[Piece]:
    """Pieces of rounds of `size` tokens, up to the one that ends the stream."""
    events = [Event(0, token) for token in ids]
    events[-1] = Event(0, ids[-1], finish=last)
    pieces: list[Piece] = []
    for at in range(0, len(events), size):
        pieces.append(stream.push(events[at : at + size]))
        if pieces[-1].finish:
            break
    return pieces


def _text(pieces: list[Piece]) -> str:
    return "".join(p.text for p in pieces)


@given(
    text=st.text("ab<É🙂 ", min_size=1, max_size=30),
    stop=st.text("ab<É🙂 ", min_size=1, max_size=3),
    size=st.integers(1, 8),
)
@settings(max_examples=300, deadline=None)
def test_a_stop_string_ends_the_text_wherever_tokens_and_rounds_are_cut(
    tokenizer: Tokenizer, text: str, stop: str, size: int
) -> None:
    ids, params = tokenizer.encode(text), SamplingParams(stop=(stop,))
    stream = TextStream(tokenizer, params, (END,))
    pieces = _feed(stream, ids, LENGTH, size)
    assert _text(pieces) == text.partition(stop)[0]
    assert pieces[-1].finish is (STOP if stop in text else LENGTH)
    assert pieces[-1].stop == (stop if stop in text else None)
    one_by_one = len(_feed(TextStream(tokenizer, params, (END,)), ids, LENGTH))
    reported = [event.token for piece in pieces for event in piece.tokens]
    assert reported == ids[:one_by_one] and stream.tokens == one_by_one


def test_the_id_that_ended_is_counted_but_not_shown(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello")
    end = tokenizer.encode("!")[0]
    for params, eos in (
        (SamplingParams(), (end,)),
        (SamplingParams(stop_token_ids=(end,), ignore_eos=True), (END,)),
    ):
        stream = TextStream(tokenizer, params, eos)
        pieces = _feed(stream, [*ids, end], STOP)
        assert (_text(pieces), stream.tokens) == ("hello", len(ids) + 1)
        assert [event.token for event in pieces[-1].tokens] == [end]
    shown = TextStream(tokenizer, SamplingParams(ignore_eos=True), (end,))
    assert _text(_feed(shown, [*ids, end], LENGTH)) == "hello!"


@pytest.mark.parametrize(
    ("text", "least", "said"), [("a.b.c.d", 5, "a.b.c"), ("ab.cd", 3, "ab"), ("ab.cd", 4, "ab.cd")]
)
def test_stop_strings_count_from_min_tokens_on(
    tokenizer: Tokenizer, text: str, least: int, said: str
) -> None:
    ids = [i for char in text for i in tokenizer.encode(char)]
    assert len(ids) == len(text)
    for size in (1, 3, 7):
        stream = TextStream(tokenizer, SamplingParams(stop=(".",), min_tokens=least), (END,))
        assert _text(_feed(stream, ids, LENGTH, size)) == said


def test_half_a_character_and_a_held_stop_come_at_the_end(tokenizer: Tokenizer) -> None:
    first = tokenizer.encode("🙃")[:1]
    assert tokenizer.token_bytes(first[0]) != "🙃".encode(), "the token is the whole character"
    stream = TextStream(tokenizer, SamplingParams(), (END,))
    assert stream.push([Event(0, first[0])]).text == ""
    assert stream.push([Event(0, finish=FinishReason.CANCELLED)]).text == "\ufffd"
    held = TextStream(tokenizer, SamplingParams(stop=("hello!",)), (END,))
    assert held.push([Event(0, tokenizer.encode("h")[0])]).text == ""
    assert held.push([Event(0, finish=FinishReason.CANCELLED)]).text == "h"


def test_without_a_tokenizer_there_are_tokens_only() -> None:
    stream = TextStream(None, SamplingParams(stop=("x",)), (END,))
    pieces = _feed(stream, [5, 6, END], STOP)
    assert (_text(pieces), stream.tokens, pieces[-1].finish) == ("", 3, STOP)


def test_the_numbers_of_drafts_outlive_an_end_that_does_not_carry_them() -> None:
    stream = TextStream(None, SamplingParams(), (END,))
    stream.push([Event(0, 5, drafted=3, accepted=1), Event(0, 6, drafted=3, accepted=1)])
    assert (stream.drafted, stream.accepted) == (3, 1)
    stream.push([Event(0, 7, drafted=6, accepted=4)])
    stream.push([Event(0, finish=FinishReason.CANCELLED)])
    assert (stream.drafted, stream.accepted) == (6, 4)


def _answer(tokenizer: Tokenizer, text: str, stop: str, size: int, **how: Any) -> tuple[str, Any]:
    """(text, stop string) of a chat. `thinking`: its prompt ends in an open thought."""
    keep, least = how.pop("keep_stop", False), how.pop("min_tokens", 0)
    thinking = how.pop("thinking", True)
    params = SamplingParams(stop=(stop,), min_tokens=least)
    stream = TextStream(tokenizer, params, (END,), keep_stop=keep)
    marks = tokenizer.marks.values()
    stream.stop_behind(lambda: ReplyParser(thinking, TOOLS, tokens=marks, **how))
    pieces = _feed(stream, [*tokenizer.encode(text), END], STOP, size)
    return _text(pieces), pieces[-1].stop


NO_THOUGHT = {"thinking": False}
CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nSt. Ives"


@pytest.mark.parametrize("size", [1, 2, 3, 99])
@pytest.mark.parametrize(
    ("text", "stop", "said", "how"),
    [
        ("a.\n\nb\n</think>\n\nIt is. So", ".", "a.\n\nb\n</think>\n\nIt is", {}),
        ("a\n\nb\n</think>\n\nIt is.\n\nSo", "\n\n", "a\n\nb\n</think>\n\nIt is.", {}),
        ("a. b", ".", None, {}),
        ("a </think> b", "</think>", None, {}),
        ("hm\n</think>\n\nab", "\n\na", None, {}),
        ("<think>\na.\n</think>\nIt is. So", ".", "<think>\na.\n</think>\nIt is", NO_THOUGHT),
        ("It is. So", ".", "It is", NO_THOUGHT),
        ("  . So", ".", "  ", NO_THOUGHT),
        (" <think", ">", None, NO_THOUGHT),
        ("a. So\n" + CALL, ".", "a. So\n" + CALL[:-6], {}),
        ("a. <tool_call> b. c\n</think>d. e", ".", "a. <tool_call> b. c\n</think>d", {}),
        ("a\n" + CALL, "<function=", "a\n<tool_call>\n", {}),
        ("a</think>b.c", "b.c", "a</think>b.c", {"keep_stop": True}),
        ("a.</think>b.c", ".", "a.</think>b", {"min_tokens": 2}),
        (" ends. So", ".", None, {"fresh": False}),
        ("a. So", ".", "a", {"formats": Formats(reasoning="none")}),
    ],
)
def test_stop_strings_count_behind_the_thought(
    tokenizer: Tokenizer, text: str, stop: str, said: str | None, how: dict[str, Any], size: int
) -> None:
    want = (text, None) if said is None else (said, stop)
    assert _answer(tokenizer, text, stop, size, **dict(how)) == want


def test_a_thought_is_not_held_back_for_its_stop_strings(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, SamplingParams(stop=("hello!",)), (END,))
    stream.stop_behind(lambda: ReplyParser(True, tokens=tokenizer.marks.values()))
    assert stream.push([Event(0, tokenizer.encode("h")[0])]).text == "h"
    end = tokenizer.id_of("</think>")
    assert stream.push([Event(0, end)]).text == "</think>"
    assert stream.push([Event(0, tokenizer.encode("h")[0])]).text == ""
