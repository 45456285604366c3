"""Answers drawn from a grammar's masks alone, by a small sampler, without a model.

Tokens are the embedded model's. Any allowed token may occur, so these answers test more than a
model's usual text.
"""

import random
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spark_engine.runtime.engine.constraint import ConstraintSpec
from spark_engine.runtime.structured.constraints import constraint_for
from spark_engine.runtime.structured.fields import StructuredFields
from spark_engine.runtime.structured.matcher import Grammars
from spark_engine.runtime.text.reply_formats import Formats
from spark_engine.runtime.text.tokenizer import Tokenizer
from tests.repository import ROOT
from tests.runtime import small_tokenizer

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


def spec(
    tools: Sequence[Mapping[str, Any]] = (),
    choice: str | Mapping[str, Any] | None = None,
    formats: Formats | None = None,
    thinking: bool = False,
    parallel: bool = True,
    **fields: Any,
) -> ConstraintSpec | None:
    """`constraint_for` of these fields."""
    return constraint_for(
        StructuredFields(**fields),
        tools,
        choice,
        formats or Formats(),
        tokenizer(),
        grammars(),
        thinking=thinking,
        parallel=parallel,
    )


def walk(grammar: str, seed: int, most: int = 300) -> tuple[list[int], bool]:
    """(ids, whether the answer is complete): random allowed ids, with preference for closing ones.
    The ids contain no end id.
    """
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


def text(ids: Sequence[int]) -> str:
    return tokenizer().decode(ids, skip_special=False)
