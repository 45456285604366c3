"""The pieces that grammars are written of."""

from __future__ import annotations

import random
import re

import pytest

from spark_engine.errors import RequestError
from spark_engine.runtime.structured.lark import Lark, Style, in_regex, quoted, regex, without


@pytest.mark.parametrize(
    "marks", [["</parameter>"], ["<function=", "<tool_call>"], ["</think>"], ["<ab", "<ac>"]]
)
def test_texts_without_marks(marks: list[str]) -> None:
    rng, whole = random.Random(1), re.compile(without(marks))
    letters = [*"<>/=abp_ x\n", *marks, *(mark[:-1] for mark in marks), *(m[1:] for m in marks)]
    seen = set()
    for _ in range(4000):
        text = "".join(rng.choice(letters) for _ in range(rng.randint(0, 6)))
        has = any(mark in text for mark in marks)
        seen.add(has)
        assert bool(whole.fullmatch(text)) is not has, text
    assert seen == {True, False}


def test_texts_are_quoted_for_lark_and_for_regexes() -> None:
    assert quoted('a"\n\u2028\x7f') == r'"a\"\n\u2028\u007f"' or quoted("\x7f") == '"\x7f"'
    assert re.fullmatch(in_regex("a.b*[c]/(d)"), "a.b*[c]/(d)")
    assert regex(r"a/\d") == r"/a\/[0-9]/"
    with pytest.raises(RequestError, match="not valid Unicode"):
        quoted("\ud83d")


def test_a_foreign_option_in_a_schema_is_left_out() -> None:
    lark = Lark()
    lark.json({"type": "string", "x-guidance": {"lenient": True}}, Style(), "x")
    assert '"lenient": false' in lark.text("r0") and '"lenient": true' not in lark.text("r0")
