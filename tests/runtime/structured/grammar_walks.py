"""Answers drawn from a grammar's masks alone, by a small sampler, without a model.

Tokens are the embedded model's. Any allowed token may occur, so these answers test more than a
model's usual text.
"""

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spark_engine.errors import InternalError
from spark_engine.runtime.engine.constraint import ConstraintSpec
from spark_engine.runtime.structured.constraints import constraint_for
from spark_engine.runtime.structured.fields import StructuredFields
from spark_engine.runtime.structured.matcher import Grammars, Matcher
from spark_engine.runtime.text.reply_formats import Formats
from spark_engine.runtime.text.reply_parser import ReplyParser
from spark_engine.runtime.text.tokenizer import Detokenizer, Tokenizer
from tests.repository import ROOT
from tests.runtime import small_tokenizer
from tests.runtime.text.test_reply_parser import collect

XML, HERMES = Formats(tools="qwen3_coder"), Formats(tools="hermes")
Call = tuple[str, dict[str, Any]]
VOCAB = 4128  # more than the tokenizer has, and not a multiple of 64
_CLOSERS = tuple(map(str.encode, ('"', "}", "]", '"}', '"]', "</", "\n", ",", ":")))


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(ROOT / "models/tiny/checkpoint")


@cache
def grammars() -> Grammars:
    ends = tokenizer().id_of("<|im_end|>"), tokenizer().id_of("<|endoftext|>")
    return Grammars(tokenizer, VOCAB, [end for end in ends if end is not None])


@cache
def _closers() -> NDArray[np.intp]:
    known = (i for i in range(len(tokenizer())) if tokenizer().token_bytes(i) in _CLOSERS)
    return np.array(sorted({*known, *grammars().ends}), np.intp)


def small(folder: Path) -> Tokenizer:
    return Tokenizer.load(small_tokenizer.write(folder))


def tool(name: str, parameters: Any = None, strict: bool = True) -> dict[str, Any]:
    function = {"name": name, "strict": strict}
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


def form(schema: Any, **more: Any) -> dict[str, Any]:
    """OpenAI's field for an answer of this schema."""
    inner = {"name": "x", "schema": schema, **more}
    return {"response_format": {"type": "json_schema", "json_schema": inner}}


def only(row: Any, name: str = "a") -> dict[str, Any]:
    """The schema of an object with this property, which is required."""
    return {"type": "object", "properties": {name: row}, "required": [name]}


def asked(
    tools: Sequence[Mapping[str, Any]] = (),
    choice: str | Mapping[str, Any] | None = None,
    formats: Formats | None = None,
    thinking: bool = False,
    parallel: bool = True,
    **fields: Any,
) -> ConstraintSpec | None:
    """`constraint_for` of these fields."""
    known = formats or Formats(), tokenizer(), grammars()
    how = {"thinking": thinking, "parallel": parallel}
    return constraint_for(StructuredFields(**fields), tools, choice, *known, **how)


def spec(*given: Any, **fields: Any) -> ConstraintSpec:
    """The same, where the answer is bound."""
    made = asked(*given, **fields)
    assert made is not None
    return made


def allowed(matcher: Matcher) -> set[int]:
    """The ids that may come next."""
    row = np.full(-(-VOCAB // 32), 0xDEADBEEF, np.uint32)
    assert matcher.fill(row)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def accepts(grammar: str, answer: str) -> bool:
    """Whether this is a complete answer, in the tokens that the tokenizer makes of it."""
    follows = grammars()(grammar)
    try:
        for token in tokenizer().encode(answer):
            follows.advance(token)
    except InternalError:
        return False
    return follows.accepting


def walk(grammar: str, seed: int, most: int = 300) -> tuple[list[int], bool]:
    """(ids, whether the answer is complete): random allowed ids, with preference for closing ones.
    The ids contain no end id."""
    rng, matcher, ids = random.Random(seed), grammars()(grammar), []
    ends = set(grammars().ends)
    row = np.full(-(-VOCAB // 32), 0xDEADBEEF, np.uint32)
    ending: list[int] = []  # ids that close a raw string, once it is open
    while not matcher.done and len(ids) < most:
        assert matcher.fill(row)
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits)
        assert allowed.size and allowed[-1] < len(tokenizer())
        closing = _closers()[bits[_closers()] == 1]
        hurry = closing.size and rng.random() < min(0.9, len(ids) / 40)
        if not ending and rng.random() < min(0.3, len(ids) / 60):
            ending = tokenizer().encode("\n</parameter>")
        meant = [ending.pop(0)] if ending else []
        ids.append(int(rng.choice(closing if hurry else allowed)))
        if meant and bits[meant[0]]:
            ids[-1] = meant[0]
        else:
            ending = []
        matcher.advance(ids[-1])
        row[:] = 0xDEADBEEF
    whole = matcher.accepting
    return [i for i in ids if i not in ends], whole


def answers(grammar: str, seeds: Iterable[int], most: int = 300) -> Iterator[list[int]]:
    """The ids of the walks that are complete."""
    for seed in seeds:
        ids, whole = walk(grammar, seed, most)
        if whole:
            yield ids


def read(
    ids: list[int], tools: list[dict[str, Any]], formats: Formats = XML
) -> tuple[str, list[Call]]:
    """Content and calls of an answer, as the reply parser takes it apart."""
    tokens = tokenizer()
    parser = ReplyParser(False, tools, formats, tokens.marks.values(), True, True)
    deltas, at, decoder = [], 0, Detokenizer(tokens, skip_special=False)
    for i in ids:
        piece = decoder.push([i])
        deltas += parser.push(piece, [at] if i in tokens.marks else [])
        at += len(piece)
    _, content, calls = collect(deltas + parser.flush())
    return content, [(name, json.loads(given)) for name, given in calls]


def given(ids: list[int], tools: list[dict[str, Any]], formats: Formats = XML) -> dict[str, Any]:
    """The arguments of an answer's only call."""
    [(_, arguments)] = read(ids, tools, formats)[1]
    return arguments


def text(ids: Sequence[int]) -> str:
    return tokenizer().decode(ids, skip_special=False)
