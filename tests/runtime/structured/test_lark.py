"""Parts of grammars."""

import re

import pytest

from spark_engine.errors import RequestError
from spark_engine.runtime.structured.lark import Lark, Style, in_regex, quoted, regex


def test_texts_are_quoted_for_lark_and_for_regexes() -> None:
    assert quoted('a"\n\u2028\x7f') == r'"a\"\n\u2028\u007f"' or quoted("\x7f") == '"\x7f"'
    assert re.fullmatch(in_regex("a.b*[c]/(d)"), "a.b*[c]/(d)")
    assert regex(r"a/\d") == r"/a\/[0-9]/"
    with pytest.raises(RequestError, match="not valid Unicode"):
        quoted("\ud83d")


def test_a_foreign_option_in_a_schema_is_left_out() -> None:
    lark = Lark()
    lark.json({"type": "string", "x-guidance": {"lenient": True}}, Style())
    assert '"lenient": false' in lark.text("r0") and '"lenient": true' not in lark.text("r0")
