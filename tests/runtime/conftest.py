"""What tests of the runtime share: a small tokenizer, and that a grammar's bound does not count a
stopped machine's time."""

import pytest

from spark_engine.runtime.engine import masks
from spark_engine.runtime.text.tokenizer import Tokenizer
from tests.runtime import small_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(small_tokenizer.write(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(autouse=True)
def _patient_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a test means one that is slow, or hangs, it says how long."""
    monkeypatch.setattr(masks, "BOUND", 60.0)
    monkeypatch.setattr(masks, "COMPILED", 120.0)
    monkeypatch.setattr(masks, "SLOW", 60.0)
