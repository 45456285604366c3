"""The end of a long text has the ids that it has in the whole, and costs as little as it may."""

import random

import pytest

from spark_engine.runtime.server.prompts import tokenising
from spark_engine.runtime.server.prompts.tokenising import encode_tail
from spark_engine.runtime.text.tokenizer import Tokenizer
from tests.runtime import small_tokenizer

WORDS = "bear 12 naïve 猫が座っている «Où don't x=1; … cafe\u0301 a_b 🙂 -- <think> 42.5".split()
WORDS += ["été", "Once", "<|im_start|>user", "fish.", "\t", "(the)", "river"]
GAPS = (" ", " ", " ", "\n", "  ", "\n\n", " \n ", "")


class Counting(Tokenizer):
    count = 0

    def encode(self, text: str) -> list[int]:
        self.count += len(text)
        return super().encode(text)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Counting:
    found = Counting.load(small_tokenizer.write(tmp_path_factory.mktemp("t")))
    assert isinstance(found, Counting)
    return found


def _text(draw: random.Random, count: int) -> str:
    return "".join(draw.choice(WORDS) + draw.choice(GAPS) for _ in range(count))


@pytest.mark.parametrize("seed", range(20))
def test_the_end_is_the_wholes(
    tokenizer: Counting, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("HEAD", 1), ("WORD", 48), ("ALWAYS", 0)):
        monkeypatch.setattr(tokenising, name, value)
    draw = random.Random(seed)
    text = _text(draw, 300)
    whole = tokenizer.encode(text)
    for last in (1, 2, 5, 17, 64, 300, len(whole) - 1, len(whole), len(whole) + 9):
        assert encode_tail(tokenizer, text, last) == whole[-last:], last


def test_a_long_text_costs_what_its_end_does(tokenizer: Counting) -> None:
    text = _text(random.Random(1), 400_000)
    tokenizer.count = 0
    found = encode_tail(tokenizer, text, 50)
    assert len(found) == 50 and tokenizer.count < 3 * tokenising.WORD
    tokenizer.count = 0
    assert len(encode_tail(tokenizer, "a" * 4_000_000, 50)) == 50  # nowhere a word ends
    assert tokenizer.count <= 2 * tokenising.ALWAYS


def test_short_texts_are_never_cut(tokenizer: Counting) -> None:
    for text in ("", "a", "a" * tokenising.ALWAYS, "猫" * 2000):
        assert encode_tail(tokenizer, text, 3) == tokenizer.encode(text)[-3:]
