"""Marks of prompts, against the positions of a template's turns."""

from pathlib import Path
from typing import Any

import pytest

from spark_engine.runtime.text.chat import ChatTemplate
from spark_engine.runtime.text.tokenizer import Tokenizer
from spark_engine.runtime.text.turns import TURN, Turns
from tests.runtime import small_tokenizer

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
SYSTEM = {"role": "system", "content": "Be short."}
ASK, SAY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "a bear"}
RESULT = {"role": "tool", "content": "12 degrees"}


def _parts(tokenizer: Tokenizer, messages: Any, tools: Any = None) -> tuple[list[int], list[str]]:
    """The prompt's ids, and its text split at its marks."""
    ids = tokenizer.encode(ChatTemplate(small_tokenizer.TEMPLATE).render(messages, tools))
    cuts = [0, *Turns(tokenizer).marks(ids), len(ids)]
    spans = zip(cuts, cuts[1:], strict=False)
    return ids, [tokenizer.decode(ids[a:b], skip_special=False) for a, b in spans]


def test_the_system_and_the_last_turn_are_cut_off(tokenizer: Tokenizer) -> None:
    assert _parts(tokenizer, [SYSTEM, ASK])[1] == [
        f"{TURN}system\nBe short.<|im_end|>\n",
        f"{TURN}user\nhi<|im_end|>\n",
        f"{TURN}assistant\n<think>\n",
    ]


def test_tools_are_with_the_system(tokenizer: Tokenizer) -> None:
    start, middle, end = _parts(tokenizer, [ASK, SAY, RESULT], TOOLS)[1]
    assert start.startswith(f"{TURN}system\n# Tools") and start.count(TURN) == 1
    assert middle.startswith(f"{TURN}user") and middle.count(TURN) == 3
    assert end == f"{TURN}assistant\n<think>\n"


def test_without_a_system_the_start_is_no_mark(tokenizer: Tokenizer) -> None:
    start, end = _parts(tokenizer, [ASK, SAY, ASK])[1]
    assert start.count(TURN) == 3 and end == f"{TURN}assistant\n<think>\n"


def test_the_next_request_begins_with_all_up_to_the_last_mark(tokenizer: Tokenizer) -> None:
    ids, _ = _parts(tokenizer, [SYSTEM, ASK])
    longer, _ = _parts(tokenizer, [SYSTEM, ASK, SAY, ASK])
    mark = Turns(tokenizer).marks(ids)[-1]
    assert longer[:mark] == ids[:mark] and longer[: len(ids)] != ids


@pytest.mark.parametrize(
    ("text", "marks"),
    [
        ("Once upon a time", ()),
        ("", ()),
        (f"{TURN}user\nhi", ()),
        (f"{TURN}system\nhi", ()),
        (f"{TURN}system", ()),
        (f"{TURN}{TURN}", (1,)),
        (f"{TURN}system{TURN}", None),  # one mark for both
    ],
)
def test_whatever_else_is_sent(
    tokenizer: Tokenizer, text: str, marks: tuple[int, ...] | None
) -> None:
    ids = tokenizer.encode(text)
    assert Turns(tokenizer).marks(ids) == ((len(ids) - 1,) if marks is None else marks)
    assert Turns(None).marks(ids) == ()


def test_a_tokenizer_without_turns_marks_nothing(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = small_tokenizer.train().replace(TURN, "<|other|>")
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    assert Turns(Tokenizer.load(tmp_path)).marks(tokenizer.encode(TURN * 3)) == ()
