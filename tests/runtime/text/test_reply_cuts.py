"""Replies in rounds of any size, over the embedded model's tokens. test_qwen_vocabulary.py tests
all divisions of all replies over Qwen's.
"""

import random
from itertools import combinations

import pytest

from spark_engine.runtime.text.tokenizer import Tokenizer
from tests.repository import ROOT
from tests.runtime.text.reply_cuts import HEAD, TAIL, Reply, read, replies


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(ROOT / "models/tiny/checkpoint")


def test_a_reply_is_the_same_in_rounds_of_any_size(tokenizer: Tokenizer) -> None:
    rng = random.Random(1)
    for reply in replies():
        count = len(reply.events(tokenizer))
        want = read(reply, tokenizer, range(count))
        sizes = [range(0, count, size) for size in (2, 3, 4, 7, count)]
        drawn = [rng.sample(range(count), rng.randrange(count)) for _ in range(6)]
        for cuts in (*sizes, *drawn):
            assert read(reply, tokenizer, cuts) == want, (reply, cuts)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("a </tool_call> b" + TAIL, '{"a": "a </tool_call> b"}'),
        ("a </think> b</tool_call>\n\nDone.", '{"a": "a </think> b"}'),
        ("a</parameter> b\n</parameter1>\n</function>", '{"a": "a</parameter> b"}'),
    ],
)
def test_every_subset_of_borders_around_a_mark(tokenizer: Tokenizer, text: str, calls: str) -> None:
    """Individually: eight borders from the first mark in the value on; the others all, or none."""
    reply = Reply(HEAD + text)
    count, head = len(reply.events(tokenizer)), len(tokenizer.encode(HEAD + "a"))
    near = range(head, head + 8)
    others = [i for i in range(count) if i not in near]
    found = {
        read(reply, tokenizer, {*cuts, *more})
        for size in range(len(near) + 1)
        for cuts in combinations(near, size)
        for more in ((), others)
    }
    assert len(found) == 1
    ((parts, end),) = found  # type: ignore[misc]
    assert parts[0] == ("tool_calls", "f", calls) and end[3] is False
