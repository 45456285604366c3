"""What is wrong with a checkpoint's tokenizer, template or sampling is said when it is built."""

import json
import shutil
from pathlib import Path

import pytest

from spark_engine.builder.text_files import TEXT_FILES, text_bytes, text_notes
from spark_engine.errors import CheckpointError
from spark_engine.runtime.offline.embedded import find_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The embedded model's files of text."""
    for name in TEXT_FILES:
        if (path := find_checkpoint() / name).is_file():
            shutil.copy(path, tmp_path)
    return tmp_path


def test_whole_files_are_good_and_counted(folder: Path) -> None:
    assert text_notes(folder) == ()
    assert text_bytes(folder) == sum(p.stat().st_size for p in folder.iterdir()) > 100_000


def test_what_is_missing_is_noted(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    settings = folder / "tokenizer_config.json"
    settings.write_text("{}")
    (note,) = text_notes(folder)
    assert "has no chat_template.jinja, so the engine answers no chats" in note
    for named in ("{{ x }}", [{"name": "default", "template": "{{ x }}"}]):
        settings.write_text(json.dumps({"chat_template": named}))
        assert text_notes(folder) == ()
    (folder / "tokenizer.json").unlink()
    (note,) = text_notes(folder)
    assert "has no tokenizer.json" in note


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("tokenizer.json", '{"model": {"type": "BPE"', "is not valid JSON"),
        ("tokenizer.json", "[]", "holds list, not an object"),
        ("tokenizer.json", '{"model": {"type": "of tomorrow"}}', "is no tokenizer"),
        ("tokenizer_config.json", "{", "is not valid JSON"),
        ("chat_template.jinja", "a\n{% if x %}", "the chat template does not compile .*, line 2"),
        ("tokenizer_config.json", '{"chat_template": "{{"}', "the chat template does not compile"),
        ("generation_config.json", "{", "is not valid JSON"),
        ("generation_config.json", '{"temperature": "hot"}', "temperature is 'hot'; .* at least 0"),
        ("generation_config.json", '{"top_p": 5}', "top_p is 5; it must be a number from 0 to 1"),
        ("generation_config.json", '{"top_k": true}', "top_k is True"),
        ("generation_config.json", '{"min_p": -0.1}', "min_p is -0.1"),
    ],
)
def test_what_cannot_be_is_refused_by_file(folder: Path, name: str, text: str, says: str) -> None:
    if "chat_template" in text:
        (folder / "chat_template.jinja").unlink()
    (folder / name).write_text(text)
    with pytest.raises(CheckpointError, match=f"(?s){name}.*{says}"):
        text_notes(folder)


def test_what_a_generation_config_leaves_open_is_no_fault(folder: Path) -> None:
    text = '{"temperature": null, "top_k": 20, "eos_token_id": [1, 2], "do_sample": true}'
    (folder / "generation_config.json").write_text(text)
    assert text_notes(folder) == ()
