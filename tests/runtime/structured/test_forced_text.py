"""Forced text that contains marks or special tokens is written in ordinary tokens."""

import json
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from spark_engine.runtime.structured.matcher import Grammars, _Tokens
from spark_engine.runtime.text.tokenizer import Tokenizer
from tests.runtime.structured.grammar_walks import (
    VOCAB,
    XML,
    grammars,
    only,
    read,
    spec,
    tokenizer,
    tool,
)

MARKS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_start|>", "<|im_end|>"),
    *("<|endoftext|>", "<tool_response>", "</tool_response>", "<|fim_prefix|>", "<|vision_start|>"),
)
OTHERS = ("", " ", "a", " b\n", "e\u0301", "猫", "<", "think>", "\n\n", "🙂", "\ufb01", "1.5", "</")


def forced(tokens: Tokenizer, compiled: Grammars, grammar: str, blanks: int = 0) -> list[int]:
    """The ids of a grammar's only answer, except `blanks` between JSON's parts."""
    matcher, ids = compiled(grammar), list[int]()
    row = np.zeros(len(tokens) // 32 + 2, np.uint32)
    while not matcher.done:
        matcher.fill(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
        allowed = [i for i in allowed if i not in compiled.ends or len(ids) > 400]
        if not allowed:
            break
        assert len(allowed) <= 1 + blanks, allowed[:9]
        said = [i for i in allowed if tokens.token_bytes(i).strip()] if blanks else allowed
        ids.append((said or allowed)[0])
        matcher.advance(ids[-1])
    return ids


def _texts() -> Iterator[str]:
    rng = random.Random(3)
    yield from (f"a {mark} b" for mark in MARKS)
    yield from MARKS
    for _ in range(12):
        yield "".join(rng.choice((*MARKS, *OTHERS)) for _ in range(5)) + "."


def check_forced(tokens: Tokenizer, compiled: Grammars) -> None:
    """Checks that every token of such texts is an ordinary one."""
    barred = tokens.special | set(tokens.marks)
    for text in _texts():
        ids = forced(tokens, compiled, f"start: {json.dumps(text)}")
        assert b"".join(map(tokens.token_bytes, ids)) == text.encode(), text
        assert not barred & set(ids), text


def check_spelled(tokens: Tokenizer) -> None:
    """Checks the same for any bytes."""
    wrapped = _Tokens(tokens, len(tokens), (tokens.id_of("<|im_end|>") or 0,))
    barred = set(wrapped.special_token_ids)
    rng = random.Random(5)
    rows = [text.encode() for text in _texts()]
    rows += ["é".encode()[:1], "猫".encode()[1:] + b"a", b"\xff<think>\x80", b"", b"x" * 3000]
    rows += ["猫é".encode() * 700, *(rng.randbytes(20) for _ in range(20))]
    rows += [row[1:-1] for row in rows]
    for row in rows:
        ids = wrapped(row)
        assert b"".join(wrapped.tokens[i] for i in ids) == row and not barred & set(ids)
    for text in ("Hello there, <b>world</b>!\n", "def f(x): return x"):
        assert wrapped(text) == tokens.encode(text)


def test_a_forced_text_comes_token_by_token() -> None:
    check_forced(tokenizer(), grammars())


def test_any_bytes_are_spelled_exactly() -> None:
    check_spelled(tokenizer())


@pytest.mark.parametrize("mark", MARKS)
def test_every_form_writes_a_mark(mark: str) -> None:
    text = f"a {mark} b"

    def one(**fields: Any) -> str:
        ids = forced(tokenizer(), grammars(), spec(**fields).grammar)
        return tokenizer().decode(ids, skip_special=False)

    tight = {"disable_any_whitespace": True}
    for schema, want in (
        ({"enum": [text]}, text),
        ({"const": {"k": [text]}}, {"k": [text]}),
        ({**only({"const": 1}, text), "additionalProperties": False}, {text: 1}),
    ):
        assert json.loads(one(structured_outputs={"json": schema, **tight})) == want
    assert one(guided_choice=[text]) == text
    assert one(guided_regex=text.replace("|", "\\|")) == text
    assert one(guided_grammar=f'root ::= "{text}"') == text
    assert one(guided_grammar=f'start: "{text}"') == text


@pytest.mark.parametrize("mark", MARKS)
def test_a_parameter_with_a_mark_is_read_back(mark: str) -> None:
    for schema, want in (
        ({"const": f"a {mark}\nb"}, f"a {mark}\nb"),
        ({"enum": [mark]}, mark),
        ({"type": "array", "const": [mark, {mark: mark}]}, [mark, {mark: mark}]),
    ):
        tools = [tool("go", only(schema, "s"))]
        made = spec(tools, "required", XML, parallel=False)
        ids = forced(tokenizer(), grammars(), made.grammar, blanks=9)
        assert read(ids, tools) == ("", [("go", {"s": want})])


def test_a_long_forced_text_takes_little_time_a_step() -> None:
    """llguidance asks for all forced text at every step."""
    words = "a word of a text. " * 5000
    matcher, row = grammars()(f"start: {json.dumps(words)}"), np.zeros(VOCAB // 32 + 1, np.uint32)
    matcher.fill(row)
    begin = time.process_time()
    for token in tokenizer().encode(words[:64])[:8]:
        matcher.fill(row)
        matcher.advance(token)
    assert time.process_time() - begin < 0.6  # takes 2 without the limit
