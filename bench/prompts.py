"""Random conversations: token ids, or text that has about as many tokens.

Knows tokenizers; knows no server. Prompts of a run start with ids of that run, so that the server's
cache holds no prefix of an earlier run's; `shared` tokens are the same within a run.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from spark_engine.bench.load import Turn
from spark_engine.errors import OptionError
from spark_engine.runtime.text.tokenizer import Tokenizer

Span = tuple[int, int]  # minimum, maximum; both inclusive


@dataclass(frozen=True)
class ConversationShape:
    """Sizes of conversations, in tokens."""

    first: Span = (512, 2048)
    later: Span = (64, 256)  # of each turn after the first
    output: Span = (64, 256)
    turns: int = 1
    shared: int = 0  # the same tokens at the start of every conversation
    pause_s: float = 0.0  # before each turn but the first

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation, answers included."""
        later = (self.turns - 1) * self.later[1]
        return self.shared + self.first[1] + later + self.turns * self.output[1]


class Ids:
    """Draws token ids below `vocab`, without special ones if the tokenizer is known.

    Raises OptionError where there are none.
    """

    def __init__(self, vocab: int, tokenizer: Tokenizer | None = None) -> None:
        special = frozenset() if tokenizer is None else tokenizer.special
        self._ids = [i for i in range(vocab) if i not in special]
        self._tokenizer = tokenizer
        if not self._ids:
            words = f"of the ids below {vocab} all are special ones: give a larger --vocab"
            raise OptionError(words)

    def draw(self, rng: random.Random, count: int) -> list[int]:
        """`count` ids."""
        return rng.choices(self._ids, k=count)

    def text(self, ids: Sequence[int]) -> str:
        """The ids as text, cut so that the tokenizer makes as many tokens of it."""
        if self._tokenizer is None:
            raise OptionError("--prompts text needs a tokenizer: give --tokenizer FOLDER")
        text = self._tokenizer.decode(ids)
        return self._tokenizer.decode(self._tokenizer.encode(text)[: len(ids)])


def draw(
    shape: ConversationShape, count: int, ids: Ids, as_text: bool, rng: random.Random
) -> list[tuple[Turn, ...]]:
    """`count` conversations."""
    begin = ids.draw(rng, shape.shared)

    def turn(first: bool) -> Turn:
        span = shape.first if first else shape.later
        new = (begin if first else []) + ids.draw(rng, rng.randint(*span))
        most = rng.randint(*shape.output)
        pause = 0.0 if first else shape.pause_s
        return Turn(ids.text(new) if as_text else new, most, None, pause)

    return [tuple(turn(i == 0) for i in range(shape.turns)) for _ in range(count)]


def span(text: str, option: str) -> Span:
    """`512-2048` or `512`. Raises OptionError."""
    low, dash, high = text.partition("-")
    if low.isdecimal() and (high.isdecimal() or not dash):
        found = int(low), int(high or low)
        if 1 <= found[0] <= found[1]:
            return found
    raise OptionError(f"{option} is {text!r}; it must be like 512 or 512-2048")
