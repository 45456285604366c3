"""An answer that repeats the format's own marks costs no more per piece than another one: the
server parses all answers in one event loop.
"""

import time

import pytest

from spark_engine.runtime.text.reply_formats import Formats
from spark_engine.runtime.text.reply_parser import ReplyParser

HEAD = "<tool_call>\n<function=f>\n"


STRING, ARRAY = {"type": "string"}, {"type": "array"}
VALUE, OBJECT = HEAD + "<parameter=a>\n", '<tool_call>\n{"name": "f", "arguments": {"a": "'
OWN = (  # the form's own words in a value
    (HEAD + '{"a": "', "</function> "),
    (VALUE, "</parameter>x"),
    (VALUE, "</function>\n"),
    (VALUE, "</tool_call"),
)


@pytest.mark.parametrize(
    ("begin", "word", "schema"),
    [
        (VALUE, "word ", STRING),
        (VALUE, "[ord ", ARRAY),
        (VALUE, "[ord ", {"anyOf": [STRING, ARRAY]}),
        (VALUE + "</tool_call>", "word ", STRING),  # held back: it may be text after the call
        (VALUE, "</tool_call>x<function=f><parameter=a>", STRING),
        (VALUE + "</parameter>", " \n \n ", STRING),
        (VALUE, "<function=f><parameter=a></parameter></function>x", STRING),
        (OBJECT, "word ", STRING),
        (OBJECT, '</tool_call>x{"<tool_call>{"', STRING),
        ("x", "\n\n\n\n\n", STRING),
        ("", "<tool_call>x", STRING),
        *((*row, schema) for row in OWN for schema in (STRING, ARRAY)),
    ],
)
def test_the_work_is_linear_in_the_length(begin: str, word: str, schema: object) -> None:
    function = {"name": "f", "parameters": {"properties": {"a": schema}}}
    form = Formats(tools="hermes" if begin == OBJECT else "qwen3_coder")
    parser = ReplyParser(False, [{"type": "function", "function": function}], form)
    start = time.process_time()
    parser.push(begin)
    for _ in range(200_000 // len(word)):
        parser.push(word)
    parser.flush()
    assert time.process_time() - start < 3
