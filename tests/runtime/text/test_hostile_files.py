"""Damaged or malicious tokenizer files of an engine folder are refused with one line."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from spark_engine.errors import EngineError
from spark_engine.runtime.text import tokenizer as module
from spark_engine.runtime.text.chat import ChatTemplate
from spark_engine.runtime.text.tokenizer import Tokenizer
from tests.runtime import small_tokenizer

DIGITS = "1" * 5_000_000
DEEP = "[" * 100_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small_tokenizer.write(tmp_path)
    return tmp_path


def _edited(folder: Path, **fields: Any) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize("text", ["", "[]", "{", DEEP, f'{{"a": {DIGITS}}}', '{"a": ' + DEEP, "\0"])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_what_is_no_json_is_refused(name: str, text: str, folder: Path) -> None:
    (folder / name).write_text(text)
    with pytest.raises(EngineError) as caught:
        Tokenizer.load(folder)
        ChatTemplate.load(folder)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("text", ["", "[]", "{", DEEP, f'{{"a": {DIGITS}}}'])
def test_a_template_is_not_sought_in_what_is_no_json(text: str, folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(text)
    with pytest.raises(EngineError, match=r"tokenizer_config.json"):
        ChatTemplate.load(folder)


SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    "fields",
    [
        {"pre_tokenizer": {**SPLIT, "pattern": {"Regex": "("}}},
        {"pre_tokenizer": {**SPLIT, "pattern": {"Regex": "a{999999999}{999999999}"}}},
        {"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}},
        {"model": {"type": "BPE", "vocab": {"a": 1 << 80}, "merges": []}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}},
        {"model": {"type": "none"}},
        {"model": None},
        {"decoder": None},
        {"added_tokens": [{"id": 0}]},
    ],
    ids=str,
)
def test_what_is_no_tokenizer_is_refused(fields: dict[str, Any], folder: Path) -> None:
    _edited(folder, **fields)
    with pytest.raises(EngineError, match=r"tokenizer.json"):
        Tokenizer.load(folder)


@pytest.mark.parametrize(
    "rows",
    [{"x": {"content": "a"}}, {"1": {}}, {"1": "a"}, {"1": {"content": 3}}, [], {DIGITS: {}}],
)
def test_added_tokens_of_another_form_are_refused(rows: Any, folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": rows}))
    with pytest.raises(EngineError, match=r"tokenizer_config.json"):
        Tokenizer.load(folder)


def test_sizes_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the library reads them, which takes several times the file's bytes."""
    tokens = len(Tokenizer.load(folder))
    rows = {str(i): {"content": f"x{i}"} for i in range(2 * tokens)}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": rows}))
    monkeypatch.setattr(module, "MOST_TOKENS", tokens)
    with pytest.raises(EngineError, match=rf"config.json has .* tokens; at most {tokens} are read"):
        Tokenizer.load(folder)
    monkeypatch.setattr(module, "MOST_TOKENS", 10)
    monkeypatch.setattr(module, "_backend", None)
    with pytest.raises(EngineError, match="tokenizer.json has .* tokens; at most 10 are read"):
        Tokenizer.load(folder)
    monkeypatch.setattr(module, "MOST_BYTES", 10)
    with pytest.raises(EngineError, match="bytes; at most 10 are read"):
        Tokenizer.load(folder)


@pytest.mark.parametrize(
    "source", ["{{ 'a' * 10**9 }}", "{{ (('a' * 10**9) | length) }}", "{{ 10 ** 10 ** 7 }}"]
)
def test_a_template_computes_nothing_when_it_is_read(source: str) -> None:
    tracemalloc.start()
    ChatTemplate(source)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 << 20


@pytest.mark.parametrize("source", ["{{", "{% for %}", "{{ " + "(" * 5000 + ")" * 5000 + " }}"])
def test_what_is_no_template_is_refused(source: str) -> None:
    with pytest.raises(EngineError, match="does not compile"):
        ChatTemplate(source)
