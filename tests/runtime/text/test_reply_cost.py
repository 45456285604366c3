"""An answer that repeats the form's own words costs no more a piece than another: the server reads
all answers in one event loop."""

from __future__ import annotations

import time

import pytest

from spark_engine.runtime.text.reply_parser import ReplyParser

HEAD = "<tool_call>\n<function=f>\n"


@pytest.mark.parametrize("kind", ["string", "array"])
@pytest.mark.parametrize(
    ("begin", "word"),
    [
        ('{"a": "', "</function> "),
        ("<parameter=a>\n", "</parameter>x"),
        ("<parameter=a>\n", "</function>\n"),
        ("<parameter=a>\n", "</tool_call"),
    ],
)
def test_the_forms_own_words_in_a_value(begin: str, word: str, kind: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": kind}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    parser = ReplyParser(False, tools)
    parser.push(HEAD + begin)
    start = time.process_time()
    for _ in range(1500):
        parser.push(word)
    assert time.process_time() - start < 1.5, "it was 4 to 30 s"
