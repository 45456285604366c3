"""What tests of a server's processes share: the folder of a small tokenizer."""

from pathlib import Path

import pytest

from tests.runtime import small_tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_tokenizer.write(tmp_path_factory.mktemp("engine") / "tokenizer")
