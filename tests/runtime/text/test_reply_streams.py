"""Recorded answers at every split point (tests/golden/reply_streams.json), and random streams.

Most are deviations observed in models of the family, with their expected parts written by hand; the
others are the embedded model's, reviewed. `marks`: positions of marks that were generated as
tokens; "tokens": false is a tokenizer without them. A call's arguments are stored as text, since an
incomplete call is not JSON.
"""

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_engine.runtime.text.reply_formats import Formats, marks
from spark_engine.runtime.text.reply_parser import ReplyParser
from spark_engine.runtime.text.reply_parts import Delta
from tests.repository import ROOT
from tests.runtime.text.test_reply_parser import collect

RECORDED = json.loads((ROOT / "tests/golden/reply_streams.json").read_text(encoding="utf-8"))
TOOLS, STREAMS = RECORDED["tools"], RECORDED["streams"]
Parts = tuple[str, str, list[tuple[str, str]]]


def _parser(row: dict[str, Any]) -> ReplyParser:
    tools = TOOLS if row["tools"] else ()
    formats = Formats(tools=row["form"])
    tokens = marks() if row.get("tokens", True) else ()
    return ReplyParser(row["thinking"], tools, formats, tokens, row["fresh"], row["parallel"])


def _parts(row: dict[str, Any], cuts: Sequence[int], ahead: bool = False) -> Parts:
    """Pieces of the stream, divided at these positions. A mark's position comes with the piece in
    which it starts, or all are `ahead`."""
    parser, text, places = _parser(row), row["text"], row["marks"]
    deltas: list[Delta] = []
    edges = [0, *cuts, len(text)]
    for start, end in zip(edges, edges[1:], strict=False):
        shown = places if ahead else [at for at in places if start <= at < end]
        deltas += parser.push(text[start:end], shown)
    deltas += parser.flush()
    assert all(delta.text for delta in deltas)
    found = collect(deltas)
    assert parser.calls == len(found[2])
    return found


@pytest.mark.parametrize("row", STREAMS, ids=lambda row: row["name"])
def test_a_recorded_stream_at_every_split_point(row: dict[str, Any]) -> None:
    text = row["text"]
    want = row["reasoning"], row["content"], [(name, given) for name, given in row["calls"]]
    assert _parts(row, ()) == want
    assert _parts(row, range(1, len(text))) == want
    for cut in range(1, len(text)):
        assert _parts(row, (cut,), ahead=bool(cut % 2)) == want, (text[:cut], text[cut:])
    rng = random.Random(text)
    for _ in range(5):
        cuts = sorted(rng.choices(range(len(text) + 1), k=7))
        assert _parts(row, cuts) == want, cuts


PIECES = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=weather>", "</function>"),
    *("<function=weather", "<parameter=city>", "<parameter=days>", "<parameter=hours>\n"),
    *("</parameter>", "\n", "a", " ", "<", "{", "}", '"', "\n</parameter>\n", "[1]", "None"),
    '{"name": "weather", "arguments": {"city": "Rome"}}',
    "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n"
    "</tool_call>",
]
SWITCHES = dict.fromkeys(("thinking", "tools", "fresh", "parallel", "tokens"), st.booleans())
FORMS = st.sampled_from(["qwen3_coder", "hermes", "none"])
DRAWN = st.fixed_dictionaries({**SWITCHES, "form": FORMS})


@given(
    row=DRAWN,
    pieces=st.lists(st.tuples(st.sampled_from(PIECES), st.booleans()), max_size=10),
    data=st.data(),
)
@settings(max_examples=800, deadline=None)
def test_a_drawn_stream_does_not_depend_on_the_cut(
    row: dict[str, Any], pieces: list[tuple[str, bool]], data: st.DataObject
) -> None:
    row |= {"text": "".join(text for text, _ in pieces), "marks": []}
    at = 0
    for text, generated in pieces:
        if generated:
            row["marks"] += [
                at + i for m in marks() for i in range(len(text)) if text[i:].startswith(m)
            ]
        at += len(text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(row["text"])), max_size=6)))
    whole = _parts(row, ())
    assert _parts(row, cuts) == _parts(row, cuts, ahead=True) == whole
    if row["parallel"] is False:
        assert len(whole[2]) <= 1


def test_behind_the_one_call_that_is_wanted_nothing_need_be_generated() -> None:
    row = next(row for row in STREAMS if row["name"] == "only the first of two calls")
    text, parser = row["text"], _parser(row)
    end = text.index("</function>") + len("</function>")
    parser.push(text[: end - 1], row["marks"])
    assert not parser.has_ended()
    parser.push(text[end - 1 : end])
    assert parser.has_ended()
    assert parser.push(text[end:]) == parser.flush() == []
