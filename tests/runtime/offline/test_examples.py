"""The files in examples/ run as they are, on the embedded model, which they share here."""

import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import spark_engine
from spark_engine import LLM
from tests.repository import PATH, ROOT, files

EXAMPLES = files("examples/*.py")
SAID = {  # what each prints, at least
    "asynchronous": ["Once upon a time", "The little bear"],
    "batch": [f"sum-{n} " for n in range(4)],
    "chat": ["What is 3 plus 4?", "answer: ", "What is 20 minus 5?"],
    "generate": ["Once upon a time", "One day, Tom", "[24 tokens, length]"],
    "json_schema": ["'animal': "],
    "stream": [" tokens]"],
}


@pytest.fixture(scope="module")
def llm(embedded: Path) -> Iterator[LLM]:
    with LLM(embedded) as opened:
        yield opened


def test_every_example_is_tried() -> None:
    assert {path.stem for path in EXAMPLES} == SAID.keys()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(
    path: Path,
    llm: LLM,
    embedded: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def opened(engine: str) -> Any:
        assert engine == str(embedded)
        return nullcontext(llm)

    monkeypatch.setitem(os.environ, "PYTHONPATH", PATH)
    monkeypatch.setattr(sys, "argv", [str(path), str(embedded)])
    monkeypatch.setattr(spark_engine, "LLM", opened, raising=False)
    runpy.run_path(str(ROOT / path), run_name="__main__")
    shown = capfd.readouterr().out
    assert [words for words in SAID[path.stem] if words not in shown] == [], shown
