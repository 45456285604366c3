"""The list of ids, and the vocabularies that it is for. tests/runtime/text has Qwen's own."""

import json
import zlib
from base64 import b64encode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from spark_engine.builder.plan.drafts import parse_vocab
from spark_engine.models import draft_vocabulary
from spark_engine.models.draft_vocabulary import FILE, digest, listed
from tests.repository import ROOT
from training.draft_vocabulary import main

VOCAB = {"a": 0, "b": 1, "ab": 2, "<end>": 3}
ABSENT = Path("no such folder")
TINY = ROOT / "models" / "tiny" / "checkpoint"


def test_the_list_is_small_and_has_what_every_text_needs() -> None:
    """Bytes, from which any text is made, and each token that ends or marks a part of one."""
    ids = listed(248_320, ABSENT)
    assert list(ids) == sorted({*ids}) and len(ids) == 65_536
    assert {*range(256), *range(248_044, 248_077)} <= {*ids} and ids[-1] == 248_076
    assert sum(i < 65_536 for i in ids) > 0.6 * len(ids), "those that were merged first"
    assert FILE.stat().st_size < 100_000


def test_another_number_of_rows_is_another_vocabulary() -> None:
    assert listed(248_319, ABSENT) == listed(151_936, ABSENT) == ()


@pytest.mark.parametrize(
    ("stored", "ids"),
    [
        ({"model": {"vocab": VOCAB}}, (1, 3)),
        ({"model": {"vocab": {**VOCAB, "<end>": 4, "<more>": 3}}}, (1, 3)),  # behind the BPE's own
        ({"model": {"vocab": dict(reversed(VOCAB.items()))}}, (1, 3)),
        ({"model": {"vocab": {**VOCAB, "a": 1, "b": 0}}}, ()),
        ({"model": {"vocab": {"a": 0, "b": 1}}}, ()),
        ({"model": {"vocab": ["a", "b", "ab"]}}, ()),
        ({"model": {"vocab": {**VOCAB, "a": "0"}}}, ()),
        ({"model": {}}, ()),
        (["a"], ()),
        (None, (1, 3)),  # no file
    ],
)
def test_a_tokenizer_tells_the_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: Any, ids: tuple[int, ...]
) -> None:
    bits = b64encode(zlib.compress(np.packbits([0, 1, 0, 1, 0]).tobytes())).decode()
    known = {"rows": 5, "tokens": 3, "digest": digest(VOCAB, 3), "ids": bits}
    monkeypatch.setattr(draft_vocabulary, "FILE", tmp_path / "list.json")
    (tmp_path / "list.json").write_text(json.dumps(known))
    if stored is not None:
        (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    assert listed(5, tmp_path) == ids


def test_a_list_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From files by their languages; bytes and special tokens come whatever the files have."""
    texts = {
        "libreoffice-help-en-us/usr/share/libreoffice/help/en-US/text": "<p>The fox</p><!--zzq-->",
        "libpython3.11-stdlib": "def fox(): return 1",
        "elsewhere": "unread",
    }
    for folder, text in texts.items():
        (tmp_path / folder).mkdir(parents=True)
        for i in range(20):
            name = f"{i}.py" if "python" in folder else f"{i}.html"
            (tmp_path / folder / name).write_text(text)
    tokenizer = TINY / "tokenizer.json"
    out, mine = tmp_path / "list.json", tmp_path / "mine.txt"
    words = [str(tokenizer), str(tmp_path), "--rows", "4096", "--listed", "280"]
    main([*words, "--out", str(out), "--ids", str(mine)])
    monkeypatch.setattr(draft_vocabulary, "FILE", out)
    ids = listed(4096, TINY)
    assert len(ids) == 280 and parse_vocab(str(mine)) == ids
    reader = Tokenizer.from_file(str(tokenizer))
    assert {*range(4087, 4096)} <= {*ids} and {i for i in range(256)} <= {*ids}
    assert {*reader.encode("The fox").ids, *reader.encode("def fox(): return 1").ids} <= {*ids}
    assert len({*reader.encode("unread zzq").ids} - {*ids}) > 0


def test_a_tokenizer_that_is_no_json_is_another_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"\xff{")
    assert listed(248_320, tmp_path) == ()
