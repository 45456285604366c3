"""Raw text up to a mark: the allowed texts; every mask against the letters of the vocabulary."""

import random

import pytest

from spark_engine.runtime.structured.lark import Lark, quoted
from spark_engine.runtime.structured.matcher import Matcher
from spark_engine.runtime.structured.raw_text import SLICES, without
from tests.runtime.structured.grammar_walks import allowed, grammars, tokenizer

MARKS = [["</parameter>"], ["<function=", "<tool_call>"], ["</think>"], ["<ab", "<ac>"]]


def _matcher(marks: list[str], end: str = "") -> Matcher:
    lark = Lark()
    text = without(lark, marks)
    return grammars()(lark.text(f"{text} {quoted(end)}" if end else text))


@pytest.mark.parametrize("marks", MARKS)
def test_texts_without_marks(marks: list[str]) -> None:
    rng, seen = random.Random(1), set()
    letters = [*"<>/=abp_ x\n猫", *marks, *(mark[:-1] for mark in marks), *(m[1:] for m in marks)]
    for _ in range(400):
        text = "".join(rng.choice(letters) for _ in range(rng.randint(0, 6)))
        has = any(mark in text for mark in marks)
        seen.add(has)
        matcher = _matcher(marks)
        taken = all(
            token in allowed(matcher) and not matcher.advance(token)
            for token in tokenizer().encode(text)
        )
        assert (taken and matcher.accepting) is not has, text
    assert seen == {True, False}


@pytest.mark.parametrize("mark", [marks[0] for marks in MARKS])
def test_each_mask_behind_a_started_mark_is_exact(mark: str) -> None:
    tokens = tokenizer()
    plain = {i: tokens.token_bytes(i) for i in range(len(tokens))}
    plain = {i: b for i, b in plain.items() if b and b.isascii() and i not in tokens.special}
    plain = {i: b for i, b in plain.items() if i not in tokens.marks}
    for prefix in ("", "a ", *(mark[:n] for n in range(1, len(mark))), "<" + mark[:2]):
        matcher = _matcher([mark], mark + "\n!")
        for byte in prefix.encode():
            matcher.advance(next(i for i, b in plain.items() if b == bytes([byte])))
        may = allowed(matcher)
        for i, letters in plain.items():
            whole = prefix + letters.decode()
            _, found, tail = whole.partition(mark)
            want = not found or "\n!".startswith(tail)
            assert (i in may) is want, (prefix, letters)


def test_text_after_a_partial_mark_is_a_slice_of_the_vocabulary() -> None:
    for marks, own in ((["</parameter>"], SLICES[1]), (["<function=", "<tool_call>"], SLICES[0])):
        lark = Lark()
        assert own in lark.text(without(lark, marks))
