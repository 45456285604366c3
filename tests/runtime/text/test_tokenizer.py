"""Text to ids and back: whole, and as streams divided anywhere."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from spark_engine.errors import EngineError, RequestError
from spark_engine.runtime.text.tokenizer import Detokenizer, Tokenizer
from tests.runtime import small_tokenizer

TEXTS = st.one_of(st.text(max_size=60), st.sampled_from(small_tokenizer.TEXT))


@pytest.fixture(scope="module")
def backend() -> Backend:
    return Backend.from_str(small_tokenizer.train())


@given(data=st.data(), skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_deltas_of_random_ids_add_up_to_the_full_decode(
    tokenizer: Tokenizer, backend: Backend, data: st.DataObject, skip: bool
) -> None:
    size = backend.get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size - 1), max_size=40))
    stream = Detokenizer(tokenizer, skip)
    deltas = [stream.push([i]) for i in ids]
    whole = backend.decode(ids, skip_special_tokens=skip)
    assert "".join(deltas) + stream.flush() == whole
    assert tokenizer.decode(ids, skip) == whole


@given(text=TEXTS)
@settings(max_examples=200, deadline=None)
def test_text_survives_a_round_trip_and_no_delta_splits_a_character(
    tokenizer: Tokenizer, text: str
) -> None:
    stream = Detokenizer(tokenizer, skip_special=False)
    deltas = [stream.push([i]) for i in tokenizer.encode(text)]
    assert "".join(deltas) == text
    assert stream.flush() == ""
    assert "\ufffd" not in "".join(deltas) or "\ufffd" in text


def test_what_a_training_run_left_in_the_file_is_not_obeyed(tmp_path: Path) -> None:
    text = " ".join(["a bear and a fox"] * 4)
    plain = Backend.from_str(small_tokenizer.train())
    want = plain.encode(text, add_special_tokens=False).ids
    plain.enable_truncation(8)
    plain.enable_padding(length=16)
    folder = small_tokenizer.write(tmp_path)
    plain.save(str(folder / "tokenizer.json"))
    loaded = Tokenizer.load(folder)
    assert len(want) > 16 and loaded.encode(text) == want
    assert len(loaded.encode("a")) == 1


def test_special_tokens_are_skipped_but_think_is_not(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|><think>a</think><|im_end|>")
    assert tokenizer.decode(ids) == "<think>a</think>"
    assert tokenizer.decode(ids, skip_special=False).startswith("<|im_start|>")


def test_tokens_listed_only_in_the_config_get_their_ids(tokenizer: Tokenizer) -> None:
    last = tokenizer.id_of("<|audio_start|>")
    assert last == len(tokenizer) - 1
    assert tokenizer.encode("<|audio_start|>") == [last]
    assert last in tokenizer.special


def _added(folder: Path, rows: dict[int, str]) -> Tokenizer:
    """With these tokens of the configuration."""
    small_tokenizer.write(folder)
    table = {str(i): {"content": text} for i, text in rows.items()}
    config = json.dumps({"added_tokens_decoder": table})
    (folder / "tokenizer_config.json").write_text(config)
    return Tokenizer.load(folder)


def test_tokens_of_the_config_are_added_in_the_order_of_their_ids(
    tmp_path: Path, backend: Backend
) -> None:
    size = backend.get_vocab_size()
    rows = {i: f"<|x{i}|>" for i in range(size, 1002)}  # as text, "1000" sorts before "999"
    tokenizer = _added(tmp_path, rows)
    assert [tokenizer.id_of(rows[i]) for i in (999, 1000)] == [999, 1000]


def test_an_added_token_outside_the_byte_alphabet_is_its_own_text(
    tmp_path: Path, backend: Backend
) -> None:
    size = backend.get_vocab_size()
    tokenizer = _added(tmp_path, {size: "<one two>"})
    assert tokenizer.encode("a<one two>b")[1] == size
    assert tokenizer.decode(tokenizer.encode("a<one two>b")) == "a<one two>b"


def test_a_post_processor_adds_nothing(tmp_path: Path) -> None:
    small_tokenizer.write(tmp_path)
    plain = Tokenizer.load(tmp_path).encode("a fish")
    backend = Backend.from_str(small_tokenizer.train())
    ids = [("<|im_start|>", backend.token_to_id("<|im_start|>"))]
    backend.post_processor = TemplateProcessing("<|im_start|> $A", special_tokens=ids)
    (tmp_path / "tokenizer.json").write_text(backend.to_str(), encoding="utf-8")
    assert backend.encode("a fish").ids[1:] == plain
    assert Tokenizer.load(tmp_path).encode("a fish") == plain


def test_ids_without_a_token_are_empty_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([len(tokenizer) + 5, *tokenizer.encode("hi"), -1]) == "hi"


def test_a_lone_surrogate_is_the_requests_fault(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="not valid Unicode"):
        tokenizer.encode("a\ud800b")


def test_what_is_wrong_with_the_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no tokenizer"):
        Tokenizer.load(tmp_path)
    with pytest.raises(EngineError, match="9999"):
        _added(tmp_path, {9999: "<|x|>"})
    path = tmp_path / "tokenizer.json"
    settings_ = json.loads(path.read_text())
    path.write_text(json.dumps({**settings_, "decoder": {"type": "Metaspace"}}))
    with pytest.raises(EngineError, match="byte-level"):
        Tokenizer.load(tmp_path)
    path.write_text("{")
    with pytest.raises(EngineError, match="not valid JSON"):
        Tokenizer.load(tmp_path)
