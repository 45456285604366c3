"""The list of ids, and the vocabularies that it is for. tests/runtime/text has Qwen's own."""

import json
import zlib
from base64 import b64encode
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_engine.models import draft_vocabulary
from spark_engine.models.draft_vocabulary import FILE, digest, listed

VOCAB = {"a": 0, "b": 1, "ab": 2, "<end>": 3}
ABSENT = Path("no such file")


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
    tokenizer = tmp_path / "tokenizer.json"
    if stored is not None:
        tokenizer.write_text(json.dumps(stored))
    assert listed(5, tokenizer) == ids


def test_a_tokenizer_that_is_no_json_is_another_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"\xff{")
    assert listed(248_320, tmp_path / "tokenizer.json") == ()
